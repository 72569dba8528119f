"""Attention over the paged cache: equal to its slow twin, and blind to what is not its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.paged import Row, attention_batch, scattered
from worker.attention import torch_paged
from worker.attention.base import Attention, AttentionBatch
from worker.attention.reference import ReferenceAttention
from worker.attention.torch_paged import TorchPagedAttention
from worker.kv_cache import KVCache

CPU = torch.device("cpu")
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Rows of one step, and a cache with their keys and values; all other blocks hold NaN."""

    rows: list[Row]
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int

    def cache(self) -> KVCache:
        taken = [block for row in self.rows for block in row.blocks]
        size = (1, max(taken) + 3, self.block_tokens, self.kv_heads, self.head_dim)
        cache = KVCache(*size, torch.float32, CPU)
        cache.k.fill_(NAN)
        cache.v.fill_(NAN)
        cache.zero(torch.tensor([0, *taken]))
        generator = torch.Generator().manual_seed(3)
        for row in self.rows:
            shape = (row.computed + row.count, self.kv_heads, self.head_dim)
            slots = attention_batch([Row(0, shape[0], row.blocks)], self.block_tokens).slot_mapping
            k, v = (torch.randn(shape, generator=generator) for _ in "kv")
            cache.write(0, k, v, slots)
        return cache

    def queries(self) -> Tensor:
        shape = (sum(row.count for row in self.rows), self.heads, self.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(4))

    def batch(self, padding: int = 0) -> AttentionBatch:
        return attention_batch(self.rows, self.block_tokens, padding=padding)


def attend(attention: Attention, case: Case, padding: int = 0) -> Tensor:
    plan = attention.plan(case.batch(padding))
    return attention.run(case.queries(), *case.cache().layer(0), plan)


def paged(case: Case) -> TorchPagedAttention:
    return TorchPagedAttention(case.block_tokens, torch.float32)


def case_of(
    *rows: tuple[int, int], block_tokens: int = 4, kv_heads: int = 2, group: int = 3
) -> Case:
    """Rows as (computed, count), decode rows first."""
    sizes = [-(-sum(row) // block_tokens) for row in rows]
    blocks = scattered(sum(sizes) + 5, *sizes)
    placed = [Row(*row, own) for row, own in zip(rows, blocks, strict=True)]
    return Case(placed, kv_heads * group, kv_heads, 8, block_tokens)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    decodes = draw(st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=6))
    span = st.tuples(st.integers(0, 40), st.integers(2, 40))
    prefills = draw(st.lists(span, min_size=not decodes, max_size=3))
    return case_of(
        *decodes,
        *prefills,
        block_tokens=draw(st.sampled_from([1, 2, 4, 16])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
    )


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 9))
def test_any_mix_of_rows_equals_the_slow_twin_and_reads_no_foreign_block(
    case: Case, padding: int
) -> None:
    expected = attend(ReferenceAttention(), case)
    assert expected.isfinite().all()
    torch.testing.assert_close(attend(paged(case), case, padding), expected, rtol=0, atol=1e-5)


def test_the_twin_itself_is_softmax_over_what_is_visible() -> None:
    case = case_of((2, 1), kv_heads=1, group=1)
    keys, values = (
        x[0][torch.tensor(case.rows[0].blocks)].flatten(0, 1)[:3, 0]
        for x in (case.cache().k, case.cache().v)
    )
    weights = ((keys * case.queries()[0, 0]).sum(-1) / 8**0.5).exp()
    expected = (weights / weights.sum()) @ values
    torch.testing.assert_close(attend(ReferenceAttention(), case)[0, 0], expected)


@pytest.mark.parametrize("padding", [1, 2, 5, 30])
def test_padding_of_the_block_table_changes_not_one_bit(padding: int) -> None:
    case = case_of((17, 1), (3, 1), (64, 1), (5, 9))
    assert torch.equal(attend(paged(case), case, padding), attend(paged(case), case))


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7])
def test_a_decode_row_has_the_same_bits_alone_and_among_others_for_any_threads(group: int) -> None:
    rows = [(60, 1), (3, 1), (33, 1), (200, 1), (40, 1), (5, 30)]
    case = case_of(*rows, block_tokens=16, group=group)
    together = attend(paged(case), case)
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
    whole, cache = attend(paged(case), case), case.cache().layer(0)
    for start, stop in ((0, 7), (7, 8), (8, 31), (31, 45)):
        row = replace(case.rows[0], computed=start, count=stop - start)
        plan = paged(case).plan(attention_batch([row], 4))
        chunk = paged(case).run(case.queries()[start:stop], *cache, plan)
        torch.testing.assert_close(chunk, whole[start:stop], rtol=0, atol=1e-5)


def test_groups_are_bounded_and_every_decode_row_is_in_exactly_one(
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
        attend(paged(case), case), attend(ReferenceAttention(), case), rtol=0, atol=1e-5
    )
