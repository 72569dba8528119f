"""Compiled attention over the paged cache: equal to its slow twin, blind to what is not its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels import NAMES, assert_near, native_kernels
from tests.support.paged import PagedCase, attention_batch, case_of
from worker.attention.native_paged import NativePagedAttention
from worker.attention.reference import ReferenceAttention


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    decodes = draw(st.lists(st.tuples(st.integers(0, 600), st.just(1)), max_size=5))
    span = st.tuples(st.integers(0, 150), st.integers(2, 150))
    prefills = draw(st.lists(span, min_size=not decodes, max_size=2))
    return case_of(
        *decodes,
        *prefills,
        block_tokens=draw(st.sampled_from([1, 4, 16, 64])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([32, 64, 96])),
    )


def native(name: str, case: PagedCase) -> NativePagedAttention:
    return NativePagedAttention(native_kernels(name), case.block_tokens)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(case=cases(), padding=st.integers(0, 9))
def test_any_mix_of_rows_equals_the_slow_twin_and_reads_nothing_foreign(
    name: str, case: PagedCase, padding: int
) -> None:
    ours = case.attend(native(name, case), padding)
    assert_near(ours, case.attend(ReferenceAttention()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_bfloat16_is_as_near_as_it_can_be(name: str, head_dim: int) -> None:
    case = case_of((0, 1), (17, 1), (700, 1), (30, 90), head_dim=head_dim, dtype=torch.bfloat16)
    theirs = case.attend(ReferenceAttention())
    assert theirs.isfinite().all()
    assert_near(case.attend(native(name, case)), theirs)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others_for_any_threads(
    name: str, dtype: torch.dtype
) -> None:
    rows = [(60, 1), (3, 1), (900, 1), (256, 1), (40, 1), (5, 70), (300, 66)]
    case = case_of(*rows, dtype=dtype)
    together, cache = case.attend(native(name, case)), case.cache().layer(0)
    start = 0
    for row in case.rows:
        queries = case.queries()[start : start + row.count]
        attention = native(name, case)
        alone = attention.run(queries, *cache, attention.plan(attention_batch([row], 16)))
        assert torch.equal(alone, together[start : start + row.count])
        start += row.count


def test_queries_may_be_part_of_wider_rows() -> None:
    case = case_of((40, 1), (7, 20))
    attention = NativePagedAttention(native_kernels(), case.block_tokens)
    plan = attention.plan(attention_batch(case.rows, case.block_tokens))
    wide = torch.cat([case.queries(), torch.full((21, 4, 64), float("nan"))], dim=1)
    ours = attention.run(wide[:, : case.heads], *case.cache().layer(0), plan)
    assert_near(ours, case.attend(ReferenceAttention()))


def test_what_a_row_holds_itself_is_not_hidden_where_it_is_no_number() -> None:
    case = case_of((40, 1))
    attention = NativePagedAttention(native_kernels(), case.block_tokens)
    cache = case.cache()
    cache.k[0, case.rows[0].blocks[1], 3] = float("nan")
    plan = attention.plan(attention_batch(case.rows, case.block_tokens))
    assert attention.run(case.queries(), *cache.layer(0), plan).isnan().all()
