"""Attention with a FlashAttention library: each call keeps the library's contract, and the result
equals the reference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocol.engine.kv_window import num_passed_blocks
from tests.support import flash_contract
from tests.support.flash_contract import (
    FA2_SCHEMA,
    FA3_SCHEMA,
    ContractBroken,
    FlashContract,
    fa2_kernel,
    fa3_kernel,
    on_device,
    registered,
    varlen_attn,
)
from tests.support.paged import PagedCase, PagedRow, attention_batch, case_of
from worker.attention.flash import FlashPagedAttention
from worker.attention.flash_library import (
    FA2_OPERATOR,
    FA3_OPERATOR,
    OperatorFunction,
    load_operator,
    varlen_function,
)
from worker.attention.reference import ReferenceAttention

near = partial(torch.testing.assert_close, rtol=0, atol=2e-3)
"""For numbers near 1 in float16, which the libraries support too."""
OPERATORS = {
    "FA3": (FA3_OPERATOR, FA3_SCHEMA, fa3_kernel, flash_contract.FA3),
    "FA2": (FA2_OPERATOR, FA2_SCHEMA, fa2_kernel, flash_contract.FA2),
}
LIBRARIES = pytest.mark.parametrize("name", ["FA3", "FA2", "varlen_attn"])
BLOCK_TOKENS = {"FA3": [1, 16, 48, 256], "FA2": [16, 48, 256], "varlen_attn": [256]}


@contextmanager
def library(name: str) -> Iterator[tuple[FlashPagedAttention, FlashContract]]:
    """Make the worker's attention call the twin of a library, through the operator that the library
    registers with torch."""
    if name == "varlen_attn":
        contract = FlashContract(flash_contract.VARLEN)
        yield FlashPagedAttention(varlen_function(varlen_attn(contract))), contract
        return
    described, schema, kernel, rules = OPERATORS[name]
    contract = FlashContract(rules)
    with registered(described.namespace, schema, kernel(contract)):
        function = OperatorFunction(load_operator(described, []), described)
        yield FlashPagedAttention(function), contract


def attend(
    attention: FlashPagedAttention, case: PagedCase, window: int | None = None, **scoring: Any
) -> Tensor:
    plan = attention.plan(on_device(case.batch(padding=2)), window)
    return attention.run(case.queries(), *case.cache().layer(0), plan, **scoring)


@st.composite
def scored_cases(draw: st.DrawFn, name: str) -> tuple[PagedCase, dict[str, Any]]:
    """Return rows of a step, and options of `attend` that the library supports."""
    decodes = draw(st.lists(st.tuples(st.integers(0, 300), st.just(1)), max_size=5))
    span = st.tuples(st.integers(0, 300), st.integers(2, 40))
    prefills = draw(st.lists(span, min_size=not decodes, max_size=3))
    case = case_of(
        *decodes,
        *prefills,
        block_tokens=draw(st.sampled_from(BLOCK_TOKENS[name])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 4, 7])),
        head_dim=draw(st.sampled_from([8, 64])),
        dtype=torch.float16,
    )
    soft_caps = [None] if name == "varlen_attn" else [None, 2.0]
    has_sinks = name == "FA3" and draw(st.booleans())
    return case, {
        "window": draw(st.sampled_from([None, 1, 5, 40, 300])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "soft_cap": draw(st.sampled_from(soft_caps)),
        "sinks": case.sinks().bfloat16().float() if has_sinks else None,
    }


@LIBRARIES
@settings(max_examples=30)
@given(data=st.data())
def test_any_mix_of_rows_equals_the_reference_in_one_call(name: str, data: st.DataObject) -> None:
    case, scoring = data.draw(scored_cases(name))
    with library(name) as (attention, contract):
        found = attend(attention, case, **scoring)
        assert len(contract.calls) == 1
    near(found, case.attend(ReferenceAttention(), **scoring))


@LIBRARIES
def test_layers_with_another_block_table_share_the_rest_of_a_plan(name: str) -> None:
    case = case_of((90, 1), (77, 20), block_tokens=256, dtype=torch.float16)
    twice = on_device(replace(case.batch(), further=(case.batch(),)))
    with library(name) as (attention, contract):
        plan = attention.plan(twice, 6)
        other = attention.plan(twice.for_entry(1), 6, plan)
        for each in (plan, other):
            near(
                attention.run(case.queries(), *case.cache().layer(0), each),
                case.attend(ReferenceAttention(), window=6),
            )
        first, second = contract.calls
    assert second["block_table"] is twice.further[0].block_table
    assert second["cu_seqlens_q"] is first["cu_seqlens_q"]


@pytest.mark.parametrize(
    ("rows", "max_queries", "num_splits"),
    [([(90, 1), (7, 1)], 1, 0), ([(90, 1), (7, 2), (3, 5)], 5, 1)],
    ids=["decodes", "prefills"],
)
def test_fa2_may_split_the_keys_of_rows_only_in_a_step_of_decodes(
    rows: list[tuple[int, int]], max_queries: int, num_splits: int
) -> None:
    with library("FA2") as (attention, contract):
        attend(attention, case_of(*rows, dtype=torch.float16))
    (call,) = contract.calls
    assert (call["max_seqlen_q"], call["num_splits"]) == (max_queries, num_splits)


def test_a_window_needs_no_freed_block() -> None:
    case = case_of((90, 1), (33, 1), (77, 20), dtype=torch.float16)
    rows = [
        replace(row, blocks=[0] * passed + [*row.blocks[passed:]])
        for row in case.rows
        for passed in [num_passed_blocks(row.computed, 16, 6)]
    ]
    with library("FA3") as (attention, _):
        plan = attention.plan(on_device(attention_batch(rows, 16)), 6)
        found = attention.run(case.queries(), *case.cache().layer(0), plan)
    near(found, case.attend(ReferenceAttention(), window=6))


def test_the_queries_may_be_a_part_of_each_tokens_memory() -> None:
    case = case_of((90, 1), (5, 3), dtype=torch.float16)
    qkv = torch.zeros(4, 1024, dtype=torch.float16)
    q = qkv[:, : 6 * 64].view(4, 6, 64).copy_(case.queries())
    with library("FA3") as (attention, _):
        plan = attention.plan(on_device(case.batch()))
        found = attention.run(q, *case.cache().layer(0), plan)
    near(found, case.attend(ReferenceAttention()))


def test_rows_that_pad_a_step_change_no_other_row() -> None:
    case = case_of((90, 1), (33, 1), dtype=torch.float16)
    batch = attention_batch([*case.rows, PagedRow(0, 1, [0])], 16)
    batch = replace(batch, context_lens=torch.tensor([91, 34, 0]))
    q = torch.cat([case.queries(), case.queries()[:1]])
    with library("FA3") as (attention, _):
        found = attention.run(q, *case.cache().layer(0), attention.plan(on_device(batch)))
    near(found[:2], case.attend(ReferenceAttention()))
    assert (found[2] == 0).all()


def test_the_sinks_of_a_layer_are_converted_once() -> None:
    case = case_of((3, 1), dtype=torch.float16)
    sinks = case.sinks()
    with library("FA3") as (attention, contract):
        for _ in range(2):
            attend(attention, case, sinks=sinks)
        first, second = (call["s_aux"] for call in contract.calls)
        assert first.data_ptr() == second.data_ptr()
        converted = weakref.ref(first)
        del sinks, first, second
        contract.calls.clear()
        gc.collect()
        assert converted() is None


def test_a_batch_without_tables_on_the_device_is_refused() -> None:
    with library("FA3") as (attention, _), pytest.raises(ValueError, match="tables"):
        attention.plan(case_of((3, 1)).batch())


@pytest.mark.parametrize("name", ["FA2", "varlen_attn"])
def test_a_library_without_sinks_is_not_called_with_them(name: str) -> None:
    case = case_of((3, 1), block_tokens=256, dtype=torch.float16)
    with library(name) as (attention, contract):
        with pytest.raises(ValueError, match="sinks"):
            attend(attention, case, sinks=case.sinks())
        assert not contract.calls


def test_a_plan_is_made_without_reading_the_tables_on_the_device() -> None:
    """Reading them would wait for the GPU."""
    batch = on_device(case_of((90, 1), (77, 20), dtype=torch.float16).batch())
    unreadable = replace(
        batch,
        block_table=batch.block_table.to("meta"),
        device_row_starts=torch.empty(3, dtype=torch.int32, device="meta"),
        device_context_lens=torch.empty(2, dtype=torch.int32, device="meta"),
    )
    with library("FA3") as (attention, _):
        plan = attention.plan(unreadable)
    assert (plan.max_queries, plan.max_context) == (20, 97)


# ---- The twin refuses each call that breaks the contract.
def call(**changed: Any) -> dict[str, Any]:
    """Return the arguments of a call, of which some are changed."""
    case = case_of((90, 1), (20, 1), (40, 3), dtype=torch.float16)
    k, v = case.cache().layer(0)
    batch = on_device(case.batch())
    arguments = {
        "q": case.queries(),
        "k": k,
        "v": v,
        "max_seqlen_q": 3,
        "cu_seqlens_q": batch.device_row_starts,
        "max_seqlen_k": 91,
        "seqused_k": batch.device_context_lens,
        "causal": True,
        "block_table": batch.block_table,
    }
    return arguments | changed


GIVEN = call()
Q, K, TABLE = GIVEN["q"], GIVEN["k"], GIVEN["block_table"]


def table_with(block: int) -> Tensor:
    table: Tensor = TABLE.clone()
    table[1, 1] = block
    return table


VIOLATIONS: dict[str, dict[str, Any]] = {
    "dtype of the `cu_seqlens_q`": {"cu_seqlens_q": GIVEN["cu_seqlens_q"].long()},
    "dtype of the `seqused_k`": {"seqused_k": GIVEN["seqused_k"].long()},
    "dtype of the block table": {"block_table": TABLE.long()},
    "dtype of the queries": {"q": Q.float()},
    "dtype of keys and values": {"v": GIVEN["v"].bfloat16()},
    "device of the `cu_seqlens_q`": {"cu_seqlens_q": GIVEN["cu_seqlens_q"].to("meta")},
    "device of the `seqused_k`": {"seqused_k": GIVEN["seqused_k"].to("meta")},
    "device of the block table": {"block_table": TABLE.to("meta")},
    "last dimension of the queries": {"q": Q.transpose(1, 2).contiguous().transpose(1, 2)},
    "last dimension of the keys": {"k": K.transpose(2, 3).contiguous().transpose(2, 3)},
    "last dimension of the `seqused_k`": {"seqused_k": torch.ones(6, dtype=torch.int32)[::2]},
    "last dimension of the block table": {"block_table": TABLE.t().contiguous().t()},
    "alignment of the queries": {"q": torch.zeros(5, 6, 65, dtype=Q.dtype)[..., :64]},
    "address of the queries": {"q": torch.zeros(5 * 6 * 64 + 1, dtype=Q.dtype)[1:].view(5, 6, 64)},
    "shape": {"q": Q.flatten(1)},
    "head dim of the keys": {"q": Q[..., :32]},
    "head dim of the library": {
        "q": torch.zeros(5, 6, 264, dtype=Q.dtype),
        **dict.fromkeys("kv", torch.zeros(*K.shape[:3], 264, dtype=Q.dtype)),
    },
    "query heads per key head": {"q": Q[:, :5]},
    "rows of the tables": {"seqused_k": GIVEN["seqused_k"][:2]},
    "order of `cu_seqlens_q`": {"cu_seqlens_q": torch.tensor([0, 2, 1, 5], dtype=torch.int32)},
    "number of queries": {"q": Q[:4]},
    "columns of the block table": {"block_table": TABLE[:, :5].contiguous()},
    "range of the block table": {"block_table": table_with(len(K))},
    "no query sees the null block": {"block_table": table_with(0)},
    "most queries of a row": {"max_seqlen_q": 2},
    "longest context": {"max_seqlen_k": 90},
    "type of the maxima": {"max_seqlen_k": torch.tensor(91)},
    "queries beyond a context": {"seqused_k": torch.tensor([91, 21, 2], dtype=torch.int32)},
    "the call is causal": {"causal": False},
    "the call is paged": {"block_table": None},
    "`cu_seqlens_k` and `seqused_k` exclude each other": {"cu_seqlens_k": GIVEN["cu_seqlens_q"]},
    "window": {"window_size": (5, -1)},
    "soft cap": {"softcap": -1.0},
    "scale": {"softmax_scale": 0.0},
    "dtype of the sinks": {"s_aux": torch.zeros(6)},
    "shape of the sinks": {"s_aux": torch.zeros(5, dtype=torch.bfloat16)},
    "device of the sinks": {"s_aux": torch.zeros(6, dtype=torch.bfloat16, device="meta")},
    "number of splits": {"num_splits": -1},
}


@pytest.mark.parametrize(("rule", "changed"), VIOLATIONS.items(), ids=VIOLATIONS)
def test_the_twin_names_the_rule_that_a_call_breaks(rule: str, changed: dict[str, Any]) -> None:
    contract = FlashContract(flash_contract.FA3)
    assert contract(**call()).isfinite().all()
    with pytest.raises(ContractBroken) as broken:
        contract(**call(**changed))
    assert str(broken.value) == rule


@pytest.mark.parametrize(
    ("name", "rule", "changed"),
    [
        ("FA2", "the library has no sinks", {"s_aux": torch.zeros(6, dtype=torch.bfloat16)}),
        ("FA2", "number of splits", {"num_splits": 0}),
        ("FA2", "block size of the library", dict.fromkeys("kv", K.view(-1, 8, 2, 64))),
        ("VARLEN", "block size of the library", {}),
    ],
)
def test_the_twin_of_another_library_has_rules_of_its_own(
    name: str, rule: str, changed: dict[str, Any]
) -> None:
    with pytest.raises(ContractBroken) as broken:
        FlashContract(getattr(flash_contract, name))(**call(**{"num_splits": 1} | changed))
    assert str(broken.value) == rule


def test_the_twin_limits_the_heads_of_a_call_with_sinks() -> None:
    case = case_of((5, 1), group=33, head_dim=8, dtype=torch.float16)
    with library("FA3") as (attention, _):
        assert attend(attention, case).isfinite().all()
        with pytest.raises(ContractBroken, match="heads of a call with sinks"):
            attend(attention, case, sinks=case.sinks())


def test_the_twin_of_torchs_function_has_no_soft_cap() -> None:
    case = case_of((5, 1), block_tokens=256, dtype=torch.float16)
    k, v = case.cache().layer(0)
    batch = on_device(case.batch())
    shared = {"block_table": batch.block_table, "seqused_k": batch.device_context_lens}
    shared |= {"cu_seqlens_q": batch.device_row_starts, "q": case.queries(), "k": k, "v": v}
    one = call(**shared, max_seqlen_q=1, num_splits=1)
    contract = FlashContract(flash_contract.VARLEN)
    assert contract(**one).isfinite().all()
    with pytest.raises(ContractBroken, match="soft cap"):
        contract(**one | {"softcap": 2.0})
