"""Triton's attention over the paged cache, in Triton's interpreter: it equals exact attention,
reads no foreign position, and writes nothing for padding.

The caches hold NaN wherever a row must not read, and new tensors are filled with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol.engine.kv_window import num_passed_blocks
from tests.support.examples import examples
from tests.support.paged import PagedCase, PagedRow, attention_batch, case_of
from tests.support.triton_code import interpreted, recorded_launches
from tests.support.triton_device import chosen_device
from worker.attention.base import AttentionBatch
from worker.attention.triton_tiles import (
    DECODE_SPLITS,
    SplitRule,
    TileShape,
    decode_tile,
    num_splits,
    prefill_tile,
)

triton_paged: Any = interpreted("worker.attention.triton_paged")
KERNELS = Path("worker/kernels/triton/attention.py")
TOLERANCE = 1e-5
"""Largest error in float32, relative to the largest number of the exact result."""


@pytest.fixture(autouse=True)
def _new_tensors_are_nan() -> Iterator[None]:
    """`torch.empty` fills memory with NaN if torch is deterministic."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


def on_device(batch: AttentionBatch) -> AttentionBatch:
    """Return the batch with the tensors that a GPU's batch has."""
    return replace(
        batch,
        block_table=batch.block_table.int(),
        device_row_starts=batch.row_starts.int(),
        device_context_lens=batch.context_lens.int(),
    )


def split_often(patch: pytest.MonkeyPatch) -> None:
    """Split the keys of both kernels into parts of 16 keys or more."""
    for name in ("DECODE_SPLITS", "PREFILL_SPLITS"):
        patch.setattr(triton_paged, name, SplitRule(min_keys=16, programs_per_processor=1))


def attend(
    case: PagedCase,
    *,
    rows: Sequence[PagedRow] = (),
    window: int | None = None,
    num_processors: int = 8,
    padding: int = 0,
    **scoring: Any,
) -> Tensor:
    """Return the attention that the kernels compute, [T, H, D]. `rows` replace those of the case,
    but read the same cache."""
    attention = triton_paged.TritonPagedAttention(case.block_tokens, num_processors=num_processors)
    batch = attention_batch(rows or case.rows, case.block_tokens, padding=padding)
    plan = attention.plan(on_device(batch), window)
    return attention.run(case.queries(), *case.cache().layer(0), plan, **scoring)


def exact(
    case: PagedCase,
    *,
    rows: Sequence[PagedRow] = (),
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention in float64, [T, H, D]. `rows` as in `attend`."""
    rows = rows or case.rows
    out, (k_cache, v_cache) = [], case.cache().layer(0)
    queries = case.queries().double().split([row.count for row in rows])
    for row, q in zip(rows, queries, strict=True):
        context = row.computed + row.count
        first = 0 if window is None else max(row.computed + 1 - window, 0)
        k, v = (
            cache[torch.tensor(row.blocks)].flatten(0, 1)[first:context].double()
            for cache in (k_cache, v_cache)
        )
        k, v = (each.repeat_interleave(case.heads // case.kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or case.head_dim**-0.5)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(row.computed, context)[:, None] - torch.arange(first, context)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, row.count, 1)
            scores = torch.cat([scores, column], 2)
        weights = scores.softmax(-1)[..., : context - first]
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@st.composite
def cases(draw: st.DrawFn) -> tuple[PagedCase, dict[str, Any]]:
    """Return a case, and options of `attend`."""
    decodes = draw(st.lists(st.tuples(st.integers(0, 300), st.just(1)), max_size=4))
    span = st.tuples(st.integers(0, 150), st.integers(2, 40))
    prefills = draw(st.lists(span, min_size=not decodes, max_size=3))
    case = case_of(
        *decodes,
        *prefills,
        block_tokens=draw(st.sampled_from([16, 32, 64, 128])),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([64, 80, 96, 128, 256])),
    )
    return case, {
        "window": draw(st.sampled_from([None, None, 1, 5, 40, 300])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "soft_cap": draw(st.sampled_from([None, None, 2.0, 50.0])),
        "sinks": case.sinks() if draw(st.booleans()) else None,
    }


@settings(max_examples=examples(8, 15), deadline=None)
@given(cases(), st.integers(0, 5), st.sampled_from([1, 4, 100]), st.booleans())
def test_any_mix_of_rows_equals_exact_attention(
    scored: tuple[PagedCase, dict[str, Any]], padding: int, num_processors: int, is_split: bool
) -> None:
    case, scoring = scored
    with pytest.MonkeyPatch.context() as patch:
        if is_split:
            split_often(patch)
        found = attend(case, padding=padding, num_processors=num_processors, **scoring)
    assert error(found, exact(case, **scoring)) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, 2e-3),
        pytest.param(
            torch.bfloat16,
            1.6e-2,
            marks=pytest.mark.skipif(
                chosen_device() is None or chosen_device() == torch.device("cpu"),
                reason="Triton's interpreter multiplies the bits of bfloat16 numbers",
            ),
        ),
    ],
)
def test_short_numbers_differ_only_by_rounding(dtype: torch.dtype, tolerance: float) -> None:
    case = case_of((70, 1), (3, 1), (40, 45), group=3, head_dim=96, dtype=dtype)
    scoring: dict[str, Any] = {"window": 60, "sinks": case.sinks()}
    assert error(attend(case, **scoring), exact(case, **scoring)) < tolerance


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_padding_rows_read_nothing_and_write_nothing(
    is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first padding row has a block table of NaN blocks, the others that of the null block."""
    case = case_of((110, 1), (7, 1), (5, 1), (60, 9), (3, 4), group=2)
    batch = on_device(case.batch())
    assert batch.device_context_lens is not None
    batch.device_context_lens[[1, 2, 4]] = 0
    batch.block_table[2] = 0
    batch.block_table[4] = 0
    cache = case.cache()
    for block in case.rows[1].blocks:
        cache.k[0, block] = cache.v[0, block] = float("nan")
    if is_split:
        split_often(monkeypatch)
    attention = triton_paged.TritonPagedAttention(16, num_processors=100)
    found = attention.run(case.queries(), *cache.layer(0), attention.plan(batch))
    expected = exact(case)
    for real, padding in ((slice(0, 1), slice(1, 3)), (slice(3, 12), slice(12, 16))):
        assert error(found[real], expected[real]) < TOLERANCE
        assert found[padding].isnan().all()


def freed(case: PagedCase, window: int) -> list[PagedRow]:
    """Return the rows with the null block, which holds NaN, for blocks outside the window."""
    return [
        replace(row, blocks=[0] * passed + [*row.blocks[passed:]])
        for row in case.rows
        for passed in [num_passed_blocks(row.computed, case.block_tokens, window)]
    ]


@pytest.mark.parametrize("window", [1, 6, 33])
def test_freed_blocks_outside_the_window_are_not_read(window: int) -> None:
    case = case_of((190, 1), (37, 1), (77, 20))
    found = attend(case, rows=freed(case, window), window=window)
    assert error(found, exact(case, window=window)) < TOLERANCE


def test_a_prompt_computed_in_chunks_equals_the_prompt_computed_whole() -> None:
    case = case_of((0, 75), group=5)
    expected, cache = exact(case), case.cache().layer(0)
    attention = triton_paged.TritonPagedAttention(16, num_processors=8)
    for start, stop in ((0, 7), (7, 8), (8, 41), (41, 75)):
        row = replace(case.rows[0], computed=start, count=stop - start)
        plan = attention.plan(on_device(attention_batch([row], 16)))
        found = attention.run(case.queries()[start:stop], *cache, plan)
        assert error(found, expected[start:stop]) < TOLERANCE


@pytest.mark.interpreted
def test_a_tile_of_queries_never_spans_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more rows than `_row_of_tile` loads together. Tiles have 8 tokens."""
    monkeypatch.setattr(triton_paged.kernels, "SEARCHED_ROWS", 4)
    counts = (2, 7, 8, 9, 15, 16, 17, 25, 3, 8, 8, 2)
    case = case_of((5, 1), *[(computed, n) for computed, n in enumerate(counts)], group=2)
    assert error(attend(case), exact(case)) < TOLERANCE


def test_a_plan_holds_for_all_shorter_contexts() -> None:
    """A captured graph is replayed with other lengths than those it was captured with. Some splits
    are then empty."""
    case = case_of((600, 1), (300, 1))
    attention = triton_paged.TritonPagedAttention(16, num_processors=100)
    batch = on_device(case.batch())
    plan = attention.plan(batch)
    shorter = [replace(row, computed=n) for row, n in zip(case.rows, (70, 0), strict=True)]
    plan.context_lens.copy_(torch.tensor([71, 1]))
    found = attention.run(case.queries(), *case.cache().layer(0), plan)
    assert error(found, exact(case, rows=shorter)) < TOLERANCE


def test_a_plan_like_another_one_differs_only_in_its_blocks() -> None:
    case = case_of((90, 1), (33, 1), (77, 20))
    attention = triton_paged.TritonPagedAttention(16, num_processors=8)
    swapped = [replace(row, blocks=row.blocks[::-1]) for row in case.rows]
    other = attention.plan(on_device(attention_batch(swapped, 16)), 40)
    plan = attention.plan(on_device(case.batch()), 40, other)
    found = attention.run(case.queries(), *case.cache().layer(0), plan)
    assert error(found, exact(case, window=40)) < TOLERANCE


def test_queries_may_be_part_of_wider_rows() -> None:
    case = case_of((40, 1), (7, 20))
    wide = torch.cat([case.queries(), torch.full((21, 4, 64), float("nan"))], dim=1)
    attention = triton_paged.TritonPagedAttention(16, num_processors=8)
    plan = attention.plan(on_device(case.batch()))
    found = attention.run(wide[:, : case.heads], *case.cache().layer(0), plan)
    assert error(found, exact(case)) < TOLERANCE


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_a_nan_in_a_rows_own_block_is_not_hidden(
    is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_split:
        split_often(monkeypatch)
    case = case_of((150, 1), (150, 3))
    cache = case.cache()
    for row in case.rows:
        cache.k[0, row.blocks[4], 3] = float("nan")
    attention = triton_paged.TritonPagedAttention(16, num_processors=100)
    found = attention.run(case.queries(), *cache.layer(0), attention.plan(on_device(case.batch())))
    assert found.isnan().all()


def test_a_block_may_lie_beyond_2_to_the_31_numbers(tmp_path: Path) -> None:
    """The cache is a file with a hole, which takes no memory."""
    size = 2**31 + 16 * 64
    memory = np.memmap(tmp_path / "cache", dtype=np.float16, mode="w+", shape=(size,))
    far = torch.from_numpy(memory).as_strided((3, 16, 1, 64), (2**30, 64, 64, 1))
    case = case_of((15, 1), kv_heads=1, dtype=torch.float16)
    near, _ = case.cache().layer(0)
    far[2] = near[case.rows[0].blocks[0]]
    attention = triton_paged.TritonPagedAttention(16, num_processors=8)
    near_plan, far_plan = (
        attention.plan(on_device(attention_batch([replace(case.rows[0], blocks=blocks)], 16)))
        for blocks in (case.rows[0].blocks, [2])
    )
    found = attention.run(case.queries(), far, far, far_plan)
    assert torch.equal(found, attention.run(case.queries(), near, near, near_plan))


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_a_sink_far_from_all_scores_leaves_all_weight_or_none(sink: float) -> None:
    case = case_of((700, 1), (3, 1), (30, 40), group=1)
    found = attend(case, sinks=torch.full((2,), sink), num_processors=100)
    expected = exact(case) if sink < 0 else torch.zeros_like(found)
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=1e-5)


MISTAKES = {
    "the window is one token longer": ("> last[:, None] - window", ">= last[:, None] - window"),
    "a token does not see itself": (
        "keys[None, :] <= last[:, None]",
        "keys[None, :] < last[:, None]",
    ),
    "a read outside the window": ("(keys >= first_key) &", "(keys >= 0) &"),
    "a sink counts in every split": ("is_real, split == 0)", "is_real, split >= 0)"),
    "a split loses its last tile": (
        "begin, tl.minimum(begin + count,",
        "begin, tl.minimum(begin + 1,",
    ),
    "splits have equal weights": ("results * weights[:, None]", "results"),
    "heads of a tile are mixed up": ("+ member % GROUP", "+ member // GROUP % GROUP"),
    "an old peak is kept": ("        peak = new_peak\n", ""),
    "a factor of the soft cap is lost": (
        "power = tl.exp2(tl.abs(x) * (-2.0",
        "power = tl.exp2(tl.abs(x) * (-1.0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_kernel_is_found(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above would fail, too."""
    right, wrong = MISTAKES[mistake]
    source = KERNELS.read_text()
    assert right in source
    name = "mistaken_" + mistake.replace(" ", "_")
    (tmp_path / f"{name}.py").write_text(source.replace(right, wrong))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(triton_paged, "kernels", interpreted(name))
    split_often(monkeypatch)
    case = case_of((190, 1), (9, 1), (40, 20), kv_heads=1)
    scoring: dict[str, Any] = {"window": 137, "soft_cap": 5.0, "sinks": case.sinks() + 4}
    found = attend(case, rows=freed(case, 137), num_processors=3, **scoring)
    assert not error(found, exact(case, **scoring)) < 10 * TOLERANCE


# ---- Planning.
def splits(rows: int, kv_heads: int, keys: int, processors: int = 132) -> int:
    return num_splits(rows * kv_heads, keys, processors, DECODE_SPLITS)


def test_few_long_rows_are_split_until_all_processors_are_busy() -> None:
    assert splits(1, 8, 32_000) * 8 >= 132
    assert splits(4, 8, 32_000) * 32 >= 132


def test_rows_that_fill_the_gpu_are_not_split() -> None:
    assert splits(256, 8, 32_000) == 1


def test_a_split_has_enough_keys() -> None:
    for keys in (1, 127, 255, 1_000):
        assert splits(1, 1, keys) <= max(1, keys // DECODE_SPLITS.min_keys)


def test_a_last_round_that_is_almost_empty_is_avoided() -> None:
    """34 rows of 8 heads need two rounds of 264 programs, the second one for 8 of them."""
    assert splits(33, 8, 32_000) == 1
    assert splits(34, 8, 32_000) > 1


@pytest.mark.parametrize("tile_of", [decode_tile, prefill_tile])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_a_tile_holds_all_heads_of_a_group(
    tile_of: Callable[[int, int, int], TileShape], head_dim: int
) -> None:
    for group in range(1, 129):
        for itemsize in (2, 4):
            assert tile_of(group, head_dim, itemsize).num_queries >= group


def test_a_layer_needs_one_launch_for_each_kind_of_row_and_one_to_merge_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of((600, 1), (3, 1), (2, 9), (30, 4), kv_heads=1)
    decodes, prefills, both = case.rows[:2], case.rows[2:], case.rows
    split_often(monkeypatch)
    for rows, num_processors, names in (
        (both, 100, ["decode", "merge", "prefill", "merge"]),
        (both, 1, ["decode", "prefill"]),
        (decodes, 100, ["decode", "merge"]),
        (decodes, 1, ["decode"]),
        (prefills, 100, ["prefill", "merge"]),
        (prefills, 1, ["prefill"]),
    ):
        with recorded_launches() as launched:
            attend(replace(case, rows=rows), num_processors=num_processors)
        assert launched == names


# ---- Wrong arguments.
def test_a_cache_of_rounded_heads_is_refused() -> None:
    case = case_of((3, 1), kv_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"cache of torch\.int8"):
        attend(case)


def test_a_negative_scale_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale \(-1\.0\) must be positive"):
        attend(case_of((3, 1)), scale=-1.0)
