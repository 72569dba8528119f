"""A step's tensors, vectorised, against the same built row by row in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.steps import StepPlan
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_model import BLOCK_TOKENS, MAX_LEN, tiny_slots
from worker.batch.batch import StepBatch, read_rows
from worker.batch.batch import build_batch as build
from worker.slots.table import Poison, SlotTable


@dataclass
class BatchRow:
    """A row in plain Python: its slot, tokens and blocks, what is computed, whether sampled."""

    slot: int
    tokens: list[int]
    blocks: list[int]
    start: int
    count: int
    sampled: bool


@dataclass
class Naive:
    """What the batch must say, list by list."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    row_starts: list[int] = field(default_factory=lambda: [0])
    context_lens: list[int] = field(default_factory=list)
    block_table: list[list[int]] = field(default_factory=list)
    sampled: list[tuple[int, int, int]] = field(default_factory=list)


def naive(rows: list[BatchRow]) -> Naive:
    out = Naive()
    most = max(-(-(row.start + row.count) // BLOCK_TOKENS) for row in rows)
    for row in rows:
        for position in range(row.start, row.start + row.count):
            out.token_ids.append(row.tokens[position])
            out.positions.append(position)
            block = row.blocks[position // BLOCK_TOKENS]
            out.slot_mapping.append(block * BLOCK_TOKENS + position % BLOCK_TOKENS)
        out.row_starts.append(len(out.token_ids))
        out.context_lens.append(row.start + row.count)
        out.block_table.append((row.blocks + [0] * most)[:most])
        if row.sampled:
            out.sampled.append((row.slot, row.start + row.count, len(out.token_ids) - 1))
    return out


def as_naive(batch: StepBatch) -> Naive:
    attention, sampled = batch.attention, batch.sampled
    columns = (sampled.slots.tolist(), sampled.known.tolist(), sampled.last.tolist())
    assert sampled.host_slots.tolist() == columns[0]
    assert sampled.host_known.tolist() == columns[1]
    return Naive(
        token_ids=batch.token_ids.tolist(),
        positions=attention.positions.tolist(),
        slot_mapping=attention.slot_mapping.tolist(),
        row_starts=attention.row_starts.tolist(),
        context_lens=attention.context_lens.tolist(),
        block_table=attention.block_table.tolist(),
        sampled=list(zip(*columns, strict=True)),
    )


def build_batch(plan: StepPlan, table: SlotTable, *, block_tokens: int) -> StepBatch:
    return build(plan, read_rows(plan), table, block_tokens=block_tokens)


def bound(rows: list[BatchRow]) -> SlotTable:
    table = tiny_slots(8, poison=Poison.WILD)
    for row in rows:
        table.bind(slot_init(row.slot, row.tokens, blocks=row.blocks))
    table.flush()
    return table


def plan_of(rows: list[BatchRow]):
    return step_plan(rows=[(row.slot, row.start, row.count, row.sampled) for row in rows])


@st.composite
def steps(draw) -> list[BatchRow]:
    slots = draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    rows = []
    for slot in slots:
        known = draw(st.integers(1, MAX_LEN - 1))
        start = draw(st.integers(0, known - 1))
        count = draw(st.one_of(st.just(1), st.integers(1, known - start)))
        tokens = draw(st.lists(st.integers(0, 96), min_size=known, max_size=known))
        needed = -(-known // BLOCK_TOKENS)
        blocks = draw(st.lists(st.integers(1, 500), min_size=needed, max_size=needed, unique=True))
        # A row may own blocks for less than all it knows; what it computes is covered.
        blocks = blocks[: -(-(start + count) // BLOCK_TOKENS)]
        rows.append(BatchRow(slot, tokens, blocks, start, count, draw(st.booleans())))
    return sorted(rows, key=lambda row: row.count != 1)


@given(rows=steps())
@settings(max_examples=80, deadline=None)
def test_the_vectorised_batch_equals_the_one_built_row_by_row(rows):
    batch = build_batch(plan_of(rows), bound(rows), block_tokens=BLOCK_TOKENS)
    assert as_naive(batch) == naive(rows)
    assert batch.attention.num_decodes == sum(row.count == 1 for row in rows)


def test_shapes_and_types_are_those_that_attention_expects():
    rows = [BatchRow(0, [5], [3], 0, 1, True), BatchRow(4, list(range(9)), [1, 2, 7], 2, 7, False)]
    batch = build_batch(plan_of(rows), bound(rows), block_tokens=BLOCK_TOKENS)
    attention = batch.attention
    tensors = {name: getattr(attention, name) for name in attention.__slots__[:5]}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "positions": (torch.int64, (8,)),
        "slot_mapping": (torch.int64, (8,)),
        "row_starts": (torch.int64, (3,)),
        "context_lens": (torch.int64, (2,)),
        "block_table": (torch.int64, (2, 3)),
    }


def test_a_step_may_sample_nothing():
    rows = [BatchRow(0, [5, 6, 7], [3], 0, 2, False)]
    batch = build_batch(plan_of(rows), bound(rows), block_tokens=BLOCK_TOKENS)
    assert batch.sampled.last.shape == (0,)


@pytest.mark.parametrize(("known", "sampled"), [(MAX_LEN + 1, False), (MAX_LEN, True)])
def test_a_row_that_would_leave_its_slot_is_refused(known, sampled):
    table = bound([BatchRow(0, [5] * MAX_LEN, [1] * 12, 0, 1, False)])
    with pytest.raises(ValueError, match=f"exceeds {MAX_LEN} tokens"):
        build_batch(step_plan(rows=[(0, known - 1, 1, sampled)]), table, block_tokens=BLOCK_TOKENS)


def test_decode_rows_that_do_not_come_first_are_refused():
    rows = [BatchRow(0, [5], [3], 0, 1, True), BatchRow(4, list(range(9)), [1, 2, 7], 2, 7, False)]
    for num_decodes in (2, 3, -1):
        plan = replace(plan_of(rows), num_decodes=num_decodes)
        with pytest.raises(ValueError, match="must be the first"):
            build_batch(plan, bound(rows), block_tokens=BLOCK_TOKENS)
