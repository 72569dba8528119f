"""One step: its tensors, the order of its work, its readback, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.engine.sampling import SamplingParams
from protocol.worker.steps import StepPlan
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.tiny_model import (
    BLOCK_TOKENS,
    CPU,
    MAX_LEN,
    TinyModel,
    tiny_cache,
    tiny_runner,
    tiny_slots,
)
from worker.batch.batch import StepBatch, read_rows
from worker.batch.batch import build_batch as build
from worker.device.logprob_columns import LogprobColumns
from worker.device.readback import Readback
from worker.slots import features
from worker.slots.table import SlotTable
from worker.step.slot_registry import Poison

PROMPT = [5, 9, 2, 77, 31]


def runner_of(model: TinyModel | None = None, *, max_slots: int = 3):
    return tiny_runner(tiny_slots(max_slots, poison=Poison.WILD), tiny_cache(20), model)


def bound(slot: int, tokens: list[int] = PROMPT, **more):
    return slot_init(slot, tokens, blocks=range(1 + 4 * slot, 5 + 4 * slot), **more)


def test_a_sampled_token_is_the_next_input_without_ever_being_sent_back():
    runner = runner_of()
    known = list(PROMPT)
    plan = step_plan(bind=[bound(0)], rows=[(0, 0, 5, True)])
    for position in range(5, 10):
        known += runner.step(plan).tokens.tolist()
        plan = step_plan(rows=[(0, position, 1, True)])
    whole = runner_of()
    plan = step_plan(bind=[bound(1, known[:-1])], rows=[(1, 0, len(known) - 1, True)])
    assert whole.step(plan).tokens.tolist() == known[-1:]


def test_a_plan_can_release_a_slot_and_bind_it_again():
    runner = runner_of(max_slots=1)
    runner.step(step_plan(bind=[bound(0, [8] * 9)], rows=[(0, 0, 9, True)]))
    plan = step_plan(
        release=[(0, 1)], bind=[bound(0, generation=2)], zero=[1, 2], rows=[(0, 0, 5, True)]
    )
    fresh = runner_of().step(step_plan(bind=[bound(0)], rows=[(0, 0, 5, True)]))
    assert runner.step(plan).tokens == fresh.tokens


def test_blocks_are_appended_before_the_step_that_writes_them():
    whole, growing = runner_of(), runner_of()
    tokens = [(7 * n) % 97 for n in range(10)]
    expected = whole.step(step_plan(bind=[bound(0, tokens)], rows=[(0, 0, 10, True)]))
    growing.step(step_plan(bind=[slot_init(0, tokens, blocks=[4])], rows=[(0, 0, 4, False)]))
    plan = step_plan(extend=[(0, 1, 9), (0, 2, 3)], zero=[9, 3], rows=[(0, 4, 6, True)])
    assert growing.step(plan).tokens == expected.tokens


def test_a_step_can_sample_nothing_or_only_release():
    runner = runner_of()
    result = runner.step(step_plan(7, bind=[bound(0)], rows=[(0, 0, 4, False)]))
    assert (result.step, result.tokens.tolist(), result.logprobs) == (7, [], None)
    result = runner.step(step_plan(8, release=[(0, 1)]))
    assert (result.step, result.tokens.tolist(), result.failed.tolist()) == (8, [], [])


def test_tokens_are_in_the_order_of_the_sampled_rows():
    runner = runner_of()
    binds = [bound(0), bound(1, [4, 4]), bound(2, [60, 61, 62])]
    rows = [(2, 0, 3, True), (0, 0, 5, False), (1, 0, 2, True)]
    together = runner.step(step_plan(bind=binds, rows=rows)).tokens.tolist()
    alone = [
        runner_of().step(step_plan(bind=[init], rows=[row])).tokens.tolist()[0]
        for init, row in ((binds[2], rows[0]), (binds[1], rows[2]))
    ]
    assert together == alone


class BrokenModel(TinyModel):
    """A model in which token 90 turns every number that it reaches into NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding[90] = float("nan")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampled_row_with_non_finite_logits_fails_alone(temperature):
    params = SamplingParams(temperature=temperature, logprobs=2)
    binds = [bound(0, params=params), bound(1, [3, 90], params=params), bound(2, params=params)]
    rows = [(0, 0, 5, True), (1, 0, 2, True), (2, 0, 5, True)]
    result = runner_of(BrokenModel()).step(step_plan(bind=binds, rows=rows))
    sound = runner_of().step(step_plan(bind=[binds[0]], rows=[rows[0]]))
    assert result.failed.tolist() == [1]
    assert result.tokens.tolist() == [*sound.tokens.tolist(), 0, *sound.tokens.tolist()]
    assert result.logprobs.rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (step_plan(release=[(1, 1)]), "slot 1 is free"),
        (step_plan(release=[(0, 2)]), "slot 0 is bound to generation 1; generation 2 cannot"),
        (step_plan(extend=[(1, 0, 3)]), "free slots"),
        (step_plan(bind=[bound(0, generation=5)]), "already bound"),
    ],
)
def test_a_plan_that_contradicts_the_slots_is_refused(plan, message):
    runner = runner_of()
    runner.step(step_plan(bind=[bound(0)], rows=[(0, 0, 5, True)]))
    with pytest.raises(ValueError, match=message):
        runner.step(plan)


def test_no_tensor_of_a_step_requires_a_gradient():
    model = TinyModel()
    model.embedding.requires_grad_()
    runner = runner_of(model)
    runner.step(step_plan(bind=[bound(0)], rows=[(0, 0, 5, True)]))
    slots, cache = runner.components.slots, runner.components.cache
    found = [*slots.tensors(), cache.k, cache.v]
    assert not any(tensor.requires_grad for tensor in found)
    assert isinstance(found[0], torch.Tensor)


# ---- features
NOTHING = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_tokens": 4}


@pytest.mark.parametrize(
    ("params", "bits"),
    [
        ({}, 0),
        ({"temperature": 0.1}, features.DRAW),
        ({"logit_bias": {1: 0.5}}, features.BIAS),
        ({"repetition_penalty": 1.1}, features.REPETITION),
        ({"frequency_penalty": -0.5}, features.COUNTS),
        ({"presence_penalty": 0.5}, features.COUNTS),
        ({"allowed_token_ids": [1]}, features.ALLOWED),
        ({"bad_words": [[1]]}, features.BAD_WORDS),
        ({"min_tokens": 1}, features.MIN_TOKENS),
        ({"logprobs": 0}, features.LOGPROBS),
        ({"logprob_token_ids": [1]}, features.LOGPROBS),
        ({"prompt_logprobs": 0}, features.PROMPT_LOGPROBS),
    ],
)
def test_each_requested_feature_has_its_bit(params: dict[str, object], bits: int) -> None:
    requested = SamplingParams(**{**NOTHING, **params})  # type: ignore[arg-type]
    assert features.features_of(slot_init(0, [1], params=requested)) == bits


# ---- readback
class FakeDeviceEvent:
    """An event in a device's queue, which the test sets."""

    is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


def test_on_the_cpu_a_copy_is_the_tensor_itself_and_a_step_is_done_at_once():
    readback, tensor = Readback(CPU), torch.arange(3)
    assert readback.copy(tensor) is tensor
    readback.seal()
    assert readback.is_done
    readback.wait()


def test_a_launched_step_is_done_when_its_own_event_is_reached():
    events: list[FakeDeviceEvent] = []

    def mark(device: torch.device) -> FakeDeviceEvent:
        events.append(FakeDeviceEvent())
        return events[-1]

    runner = tiny_runner(tiny_slots(2), tiny_cache(9), mark=mark)
    init = slot_init(0, [4, 5], blocks=[1], params=GREEDY)
    one = runner.launch(step_plan(1, bind=[init], rows=[(0, 0, 2, True)], zero=[1]))
    two = runner.launch(step_plan(2, rows=[(0, 2, 1, True)]))
    assert not one.is_done
    assert one.result().step == 1
    assert one.is_done
    assert not two.is_done, "reading a step waits for no later one"


def columns(**more: Any) -> LogprobColumns:
    return LogprobColumns(
        rows=np.array([0, 2]),
        counts=np.array([2, 0], np.int32),
        possible=torch.tensor([1, 2]),
        ids=torch.tensor([7, 8]),
        logprobs=torch.tensor([-1.0, -2.0]),
        ranks=torch.tensor([1, 5]),
        top_ids=torch.tensor([[7, 3], [4, 6]]),
        top_logprobs=torch.tensor([[-1.0, float("-inf")], [-0.5, -1.0]]),
        **more,
    )


@pytest.mark.parametrize("more", [{}, {"asked": torch.ones(2, 3)}, {"drawn": torch.ones(1, 3)}])
def test_every_tensor_of_the_columns_is_copied_and_nothing_else_changes(more):
    copied = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor + 1

    before = columns(**more)
    after = before.map_tensors(copy)
    assert len(copied) == 6 + len(more)
    assert after.ids.tolist() == [8, 9]
    assert after.rows is before.rows
    assert (after.asked is None) == ("asked" not in more)


def test_columns_report_no_more_top_tokens_than_are_possible():
    message = columns().to_message()
    assert message.counts.tolist() == [1, 0]
    assert message.rows.tolist() == [0, 2]
    assert message.top_ids.shape == (2, 2)
    assert message.asked is None
    assert message.drawn_at is None


# ---- the tensors of a step
@dataclass
class BatchRow:
    """A row in plain Python: its slot, tokens and blocks, the positions to compute, and whether it
    samples."""

    slot: int
    tokens: list[int]
    blocks: list[int]
    start: int
    count: int
    sampled: bool


@dataclass
class Naive:
    """A batch as plain lists, to compare the expected batch with the built one."""

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


def table_of(rows: list[BatchRow]) -> SlotTable:
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
        # The blocks must cover the computed positions, but not all known tokens.
        blocks = blocks[: -(-(start + count) // BLOCK_TOKENS)]
        rows.append(BatchRow(slot, tokens, blocks, start, count, draw(st.booleans())))
    return sorted(rows, key=lambda row: row.count != 1)


@given(rows=steps())
@settings(max_examples=80, deadline=None)
def test_the_vectorised_batch_equals_the_one_built_row_by_row(rows):
    batch = build_batch(plan_of(rows), table_of(rows), block_tokens=BLOCK_TOKENS)
    assert as_naive(batch) == naive(rows)
    assert batch.attention.num_decodes == sum(row.count == 1 for row in rows)


def test_shapes_and_types_are_those_that_attention_expects():
    rows = [BatchRow(0, [5], [3], 0, 1, True), BatchRow(4, list(range(9)), [1, 2, 7], 2, 7, False)]
    batch = build_batch(plan_of(rows), table_of(rows), block_tokens=BLOCK_TOKENS)
    attention = batch.attention
    tensors = {name: getattr(attention, name) for name in attention.__slots__[:5]}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "positions": (torch.int64, (8,)),
        "slot_mapping": (torch.int64, (8,)),
        "row_starts": (torch.int64, (3,)),
        "context_lens": (torch.int64, (2,)),
        "block_table": (torch.int64, (2, 3)),
    }


def test_a_batch_can_have_no_sampled_row():
    rows = [BatchRow(0, [5, 6, 7], [3], 0, 2, False)]
    batch = build_batch(plan_of(rows), table_of(rows), block_tokens=BLOCK_TOKENS)
    assert batch.sampled.last.shape == (0,)


@pytest.mark.parametrize(("known", "sampled"), [(MAX_LEN + 1, False), (MAX_LEN, True)])
def test_a_row_beyond_its_slot_is_refused(known, sampled):
    table = table_of([BatchRow(0, [5] * MAX_LEN, [1] * 12, 0, 1, False)])
    with pytest.raises(ValueError, match=f"exceeds {MAX_LEN} tokens"):
        build_batch(step_plan(rows=[(0, known - 1, 1, sampled)]), table, block_tokens=BLOCK_TOKENS)


def test_decode_rows_that_do_not_come_first_are_refused():
    rows = [BatchRow(0, [5], [3], 0, 1, True), BatchRow(4, list(range(9)), [1, 2, 7], 2, 7, False)]
    for num_decodes in (2, 3, -1):
        plan = replace(plan_of(rows), num_decodes=num_decodes)
        with pytest.raises(ValueError, match="must be the first"):
            build_batch(plan, table_of(rows), block_tokens=BLOCK_TOKENS)
