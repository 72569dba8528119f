"""Attention over the paged cache: every backend equals the reference, and a row reads only its own
blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.engine.kv_window import max_live_blocks, num_passed_blocks
from tests.support.covering import covering
from tests.support.kernels import FLOAT_NAMES, assert_near, native_kernels
from tests.support.paged import PagedCase, attention_batch
from tests.support.paged import case_of as paged_case
from worker.attention import torch_paged
from worker.attention.native_paged import NativePagedAttention
from worker.attention.reference import ReferenceAttention
from worker.attention.torch_paged import TorchPagedAttention
from worker.kv.rounding import ROUNDED, round_heads

KV_DTYPES = pytest.mark.parametrize("kv_dtype", [None, ROUNDED], ids=["as numbers", "rounded"])
"""Dtypes of the cache. None stands for the dtype of the queries."""


def paged(case: PagedCase) -> TorchPagedAttention:
    return TorchPagedAttention(case.block_tokens, torch.float32)


case_of = partial(paged_case, block_tokens=4, head_dim=8, zeroed=True)


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    decodes = draw(st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=6))
    span = st.tuples(st.integers(0, 40), st.integers(2, 40))
    prefills = draw(st.lists(span, min_size=not decodes, max_size=3))
    return case_of(
        *decodes,
        *prefills,
        block_tokens=draw(st.sampled_from([1, 2, 4, 16])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        kv_dtype=draw(st.sampled_from([None, ROUNDED])),
    )


@st.composite
def scorings(draw: st.DrawFn, case: st.SearchStrategy[PagedCase]) -> tuple[PagedCase, Any]:
    """Return a case, and options of `PagedCase.attend`."""
    drawn = draw(case)
    return drawn, {
        "window": draw(st.sampled_from([None, None, 1, 5, 40, 300])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "soft_cap": draw(st.sampled_from([None, None, 2.0])),
        "sinks": drawn.sinks() if draw(st.booleans()) else None,
        "run": draw(st.sampled_from([0, 0, 1, 3, 40, 90])),
    }


@settings(max_examples=60, deadline=None)
@given(scorings(cases()), st.integers(0, 9))
def test_any_mix_of_rows_equals_the_reference_and_reads_no_foreign_block(
    scored: tuple[PagedCase, Any], padding: int
) -> None:
    case, scoring = scored
    expected = case.attend(ReferenceAttention(), **scoring)
    assert expected.isfinite().all()
    ours = case.attend(paged(case), padding, **scoring)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_the_reference_is_softmax_over_the_visible_positions() -> None:
    case = case_of((2, 1), kv_heads=1, group=1)
    keys, values = (
        x[0][torch.tensor(case.rows[0].blocks)].flatten(0, 1)[:3, 0]
        for x in (case.cache().k, case.cache().v)
    )
    weights = ((keys * case.queries()[0, 0]).sum(-1) / 8**0.5).exp()
    expected = (weights / weights.sum()) @ values
    torch.testing.assert_close(case.attend(ReferenceAttention())[0, 0], expected)
    sink = torch.tensor([0.7])
    expected = (weights / (weights.sum() + sink.exp())) @ values
    torch.testing.assert_close(case.attend(ReferenceAttention(), sinks=sink)[0, 0], expected)


@pytest.mark.parametrize("padding", [1, 2, 5, 30])
def test_padding_of_the_block_table_changes_no_bit(padding: int) -> None:
    case = case_of((17, 1), (3, 1), (64, 1), (5, 9))
    assert torch.equal(case.attend(paged(case), padding), case.attend(paged(case)))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7])
def test_a_decode_row_has_the_same_bits_alone_and_in_a_batch(group: int) -> None:
    rows = [(60, 1), (3, 1), (33, 1), (200, 1), (40, 1), (5, 30)]
    case = case_of(*rows, block_tokens=16, group=group)
    together = case.attend(paged(case))
    cache = case.cache().layer(0)
    for index, row in enumerate(case.rows[:5]):
        batch = attention_batch([row], 16)
        alone = paged(case).run(case.queries()[index : index + 1], *cache, paged(case).plan(batch))
        assert torch.equal(alone[0], together[index])


def test_a_prompt_computed_in_chunks_equals_the_prompt_computed_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_paged, "TILE_QUERIES", 8)
    case = case_of((0, 45))
    whole, cache = case.attend(paged(case)), case.cache().layer(0)
    for start, stop in ((0, 7), (7, 8), (8, 31), (31, 45)):
        row = replace(case.rows[0], computed=start, count=stop - start)
        plan = paged(case).plan(attention_batch([row], 4))
        chunk = paged(case).run(case.queries()[start:stop], *cache, plan)
        torch.testing.assert_close(chunk, whole[start:stop], rtol=0, atol=1e-5)


def test_every_decode_row_is_in_exactly_one_group_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_paged, "MAX_GATHERED_TOKENS", 32)
    case = case_of(*[(computed, 1) for computed in (3, 40, 15, 15, 7, 90, 14, 12, 2)])
    plan = paged(case).plan(case.batch())
    rows = [row for group in plan.groups if group.rows is not None for row in group.rows.tolist()]
    assert sorted(rows) == list(range(9))
    widths = [(group.mask.shape[0], group.mask.shape[-1]) for group in plan.groups]
    assert all(number == 1 or number * tokens <= 32 for number, tokens in widths)
    torch.testing.assert_close(
        case.attend(paged(case)), case.attend(ReferenceAttention()), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("window", [1, 6, 33])
def test_with_a_window_a_row_gathers_no_passed_block(window: int) -> None:
    case = case_of((5, 1), (90, 1), (33, 1), (70, 1), (0, 9), (77, 20))
    plan = paged(case).plan(case.batch(), window)
    blocks = [group.blocks for group in plan.groups] + [span.blocks for span in plan.spans]
    gathered = torch.cat(blocks).tolist()
    for row in case.rows:
        first = num_passed_blocks(row.computed, 4, window)
        assert not {*row.blocks[:first]} & {*gathered}
        assert {*row.blocks[first:]} <= {*gathered}
    most = max_live_blocks(1, 4, window)
    assert most is not None
    assert all(each.mask.shape[-1] < 2 * most * 4 for each in plan.groups)


def test_a_window_without_its_freed_blocks_changes_no_bit() -> None:
    case = case_of((90, 1), (33, 1), (77, 20))
    expected = case.attend(paged(case), window=6)
    rows = [
        replace(row, blocks=[0] * passed + [*row.blocks[passed:]])
        for row in case.rows
        for passed in [num_passed_blocks(row.computed, 4, 6)]
    ]
    plan = paged(case).plan(attention_batch(rows, 4), 6)
    found = paged(case).run(case.queries(), *case.cache().layer(0), plan)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("window", [None, 6])
def test_a_plan_like_another_one_differs_only_in_its_blocks(window: int | None) -> None:
    case = case_of((90, 1), (33, 1), (2, 1), (77, 20), (0, 5), block_tokens=4)
    swapped = [replace(row, blocks=row.blocks[::-1]) for row in case.rows]
    other = paged(case).plan(attention_batch(swapped, 4), window)
    plan = paged(case).plan(case.batch(), window, other)
    found = paged(case).run(case.queries(), *case.cache().layer(0), plan)
    assert torch.equal(found, case.attend(paged(case), window=window))


# ---- Compiled kernels.
@st.composite
def native_cases(draw: st.DrawFn) -> PagedCase:
    decodes = draw(st.lists(st.tuples(st.integers(0, 600), st.just(1)), max_size=5))
    span = st.tuples(st.integers(0, 150), st.integers(2, 150))
    prefills = draw(st.lists(span, min_size=not decodes, max_size=2))
    return paged_case(
        *decodes,
        *prefills,
        block_tokens=draw(st.sampled_from([1, 4, 16, 64])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([32, 64, 96])),
        kv_dtype=draw(st.sampled_from([None, ROUNDED])),
    )


def native(name: str, case: PagedCase) -> NativePagedAttention:
    return NativePagedAttention(native_kernels(name), case.block_tokens)


@pytest.mark.parametrize("name", FLOAT_NAMES)
@settings(max_examples=25)
@given(scored=scorings(native_cases()), padding=st.integers(0, 9))
def test_compiled_attention_equals_the_reference_for_any_mix_of_rows(
    name: str, scored: tuple[PagedCase, Any], padding: int
) -> None:
    case, scoring = scored
    ours = case.attend(native(name, case), padding, **scoring)
    assert_near(ours, case.attend(ReferenceAttention(), **scoring))


@pytest.mark.parametrize("name", ["torch", *FLOAT_NAMES])
def test_a_sink_far_from_all_scores_leaves_all_weight_or_none(name: str) -> None:
    """The exponential of the difference between score and sink overflows or is zero."""
    case = paged_case((700, 1), (3, 1), (30, 40), group=1, zeroed=True)
    attention = paged(case) if name == "torch" else native(name, case)
    ours = case.attend(attention, sinks=torch.tensor([-1e4, 1e4]))
    assert_near(ours[:, 0], case.attend(attention)[:, 0])
    assert torch.equal(ours[:, 1], torch.zeros_like(ours[:, 1]))


@pytest.mark.parametrize("name", FLOAT_NAMES)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256, 512])
@KV_DTYPES
def test_compiled_attention_in_bfloat16_differs_only_by_rounding(
    name: str, head_dim: int, kv_dtype: torch.dtype | None
) -> None:
    rows, dtype = [(0, 1), (17, 1), (700, 1), (30, 90)], torch.bfloat16
    case = paged_case(*rows, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    theirs = case.attend(ReferenceAttention(), sinks=case.sinks())
    assert theirs.isfinite().all()
    assert_near(case.attend(native(name, case), sinks=case.sinks()), theirs)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FLOAT_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@KV_DTYPES
def test_compiled_attention_gives_a_row_the_same_bits_alone_and_in_a_batch(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    rows = [(60, 1), (3, 1), (900, 1), (256, 1), (40, 1), (5, 70), (300, 66)]
    case = paged_case(*rows, dtype=dtype, kv_dtype=kv_dtype)
    together, cache = case.attend(native(name, case)), case.cache().layer(0)
    start = 0
    for row in case.rows:
        queries = case.queries()[start : start + row.count]
        attention = native(name, case)
        alone = attention.run(queries, *cache, attention.plan(attention_batch([row], 16)))
        assert torch.equal(alone, together[start : start + row.count])
        start += row.count


CHUNKS = ((1,) * 80, (7, 64, 9), (2, 1, 30, 47), (79, 1))
"""Ways to cut the last 80 positions of a text into chunks. Each chunk is the row of one step."""


HEADS = ((1, 128, None), (2, 512, None), (3, 64, 300), (5, 32, 70), (7, 96, 33))
"""(query heads of a key/value head, numbers of a head, window). The longest heads are few, because
`generic` is slow."""


@pytest.mark.parametrize(
    ("name", "dtype", "before", "kv_dtype", "heads"),
    covering(
        FLOAT_NAMES, [torch.float32, torch.bfloat16], [0, 460], [None, ROUNDED], HEADS, together=3
    ),
    ids=str,
)
def test_compiled_attention_gives_a_position_the_same_bits_in_any_chunk(
    name: str,
    dtype: torch.dtype,
    before: int,
    kv_dtype: torch.dtype | None,
    heads: tuple[int, int, int | None],
) -> None:
    """The 80 positions are in the first two tiles of keys (`before` = 0), or in the second and
    third pieces (`before` = 460). Any three values of the parameters meet."""
    group, head_dim, window = heads
    shape: dict[str, Any] = {"kv_heads": 1, "group": group, "head_dim": head_dim}
    case = paged_case((before, 80), **shape, dtype=dtype, zeroed=True, kv_dtype=kv_dtype)
    attention, queries = native(name, case), case.queries()
    cache, row = case.cache().layer(0), case.rows[0]
    cap = 3.0 if window == 70 else None
    scoring: dict[str, Any] = {"soft_cap": cap, "sinks": case.sinks() if window == 33 else None}
    whole = case.attend(attention, window=window, **scoring)
    for chunks in CHUNKS:
        start = 0
        for count in chunks:
            chunk = replace(row, computed=before + start, count=count)
            plan = attention.plan(attention_batch([chunk], case.block_tokens), window)
            ours = attention.run(queries[start : start + count], *cache, plan, **scoring)
            assert torch.equal(ours, whole[start : start + count]), (count, start)
            start += count


@pytest.mark.parametrize("name", FLOAT_NAMES)
@pytest.mark.parametrize("before", [0, 460])
@pytest.mark.parametrize("window", [None, 33])
def test_compiled_attention_gives_a_run_that_is_seen_whole_the_same_bits_in_any_chunk(
    name: str, before: int, window: int | None
) -> None:
    """Chunks end before or after the runs [0, 40) and [80, 120)."""
    case = paged_case((before, 140), zeroed=True)
    attention, queries, ends = native(name, case), case.queries(), case.seen_ends(40)
    cache, row = case.cache().layer(0), case.rows[0]
    whole = case.attend(attention, window=window, run=40)
    assert not torch.equal(whole[:40], case.attend(attention, window=window)[:40])
    for chunks in ((40, 40, 40, 20), (63, 17, 60), (40, 1, 39, 50, 10)):
        start = 0
        for count in chunks:
            end = start + count
            chunk = replace(row, computed=before + start, count=count)
            batch = attention_batch([chunk], case.block_tokens).with_seen_ends(ends[start:end])
            ours = attention.run(queries[start:end], *cache, attention.plan(batch, window))
            assert torch.equal(ours, whole[start:end]), (count, start)
            start = end


def test_compiled_attention_accepts_queries_that_are_part_of_wider_rows() -> None:
    case = paged_case((40, 1), (7, 20))
    attention = NativePagedAttention(native_kernels(), case.block_tokens)
    plan = attention.plan(attention_batch(case.rows, case.block_tokens))
    wide = torch.cat([case.queries(), torch.full((21, 4, 64), float("nan"))], dim=1)
    ours = attention.run(wide[:, : case.heads], *case.cache().layer(0), plan)
    assert_near(ours, case.attend(ReferenceAttention()))


@KV_DTYPES
def test_compiled_attention_does_not_hide_a_nan_in_a_rows_own_block(
    kv_dtype: torch.dtype | None,
) -> None:
    case = paged_case((40, 1), kv_dtype=kv_dtype)
    attention = NativePagedAttention(native_kernels(), case.block_tokens)
    cache = case.cache()
    nan = torch.full((case.head_dim,), float("nan"))
    cache.k[0, case.rows[0].blocks[1], 3] = round_heads(nan) if cache.is_rounded else nan
    plan = attention.plan(attention_batch(case.rows, case.block_tokens))
    assert attention.run(case.queries(), *cache.layer(0), plan).isnan().all()


def test_values_of_an_earlier_row_that_are_not_finite_change_no_bit_of_a_later_row() -> None:
    """The scales of rounded values are loaded into memory of the thread, where those of an earlier
    row stay. With an odd number of keys, the last one is multiplied with one that is not seen."""
    case = paged_case((0, 9), dtype=torch.bfloat16, kv_dtype=ROUNDED)
    attention = NativePagedAttention(native_kernels(), case.block_tokens)
    expected = case.attend(attention)
    longer = paged_case((0, 40), dtype=torch.bfloat16, kv_dtype=ROUNDED)
    cache, nan = longer.cache(), torch.full((longer.head_dim,), float("nan"))
    for block in longer.rows[0].blocks:
        cache.v[0, block] = round_heads(nan)
    plan = attention.plan(attention_batch(longer.rows, longer.block_tokens))
    assert attention.run(longer.queries(), *cache.layer(0), plan).isnan().any()
    assert torch.equal(case.attend(attention), expected)
