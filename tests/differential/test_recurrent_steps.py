"""Models with recurrent layers in the worker's runner: greedy answers are those of transformers,
with prompts in chunks, states restored from checkpoints, and drafts that are right or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.worker.steps import NO_CHECKPOINT, SlotInit, StepPlan
from tests.support.checkpoints import VOCAB, write_directory
from tests.support.eager import CPU, expected, load, some_tokens
from tests.support.family_models import RECURRENT, random_model
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_model import new_slots
from worker.attention.select import select_attention
from worker.kv.cache import make_cache
from worker.slots.fields import STATE, slot_fields
from worker.spec.kv_blocks import BlockLayers
from worker.step.runner import Runner
from worker.step.slot_registry import CheckedRunner, Poison

BLOCK_TOKENS, MAX_BLOCKS = 2, 16
MAX_SLOTS, NUM_CHECKPOINTS = 13, 4
PROMPT, OTHER = some_tokens(20), some_tokens(9, seed=1)


@dataclass
class Steps:
    """A model of transformers, and a runner of the same model. Each slot has blocks of its own.

    generations   slot -> number of its requests so far
    """

    theirs: Any
    runner: Runner
    generations: dict[int, int]

    @classmethod
    def of(cls, path: Path, model_type: str) -> Steps:
        theirs = random_model(model_type)
        loaded = load(write_directory(path, theirs))
        spec = loaded.spec
        sizes = (1 + MAX_SLOTS * MAX_BLOCKS, BLOCK_TOKENS)
        cache = make_cache(BlockLayers.of(spec), *sizes, torch.float32, CPU)
        cache.rows[:, 1:] = 0xFF  # NaN
        fields = slot_fields(MAX_BLOCKS * BLOCK_TOKENS, MAX_BLOCKS, spec.state_items)
        slots = new_slots(
            fields, MAX_SLOTS, CPU, poison=Poison.WILD, num_checkpoints=NUM_CHECKPOINTS
        )
        attention = select_attention(BLOCK_TOKENS, dtype=torch.float32)
        return cls(theirs, CheckedRunner(loaded.model, slots, cache, attention), {})

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """Return the first tokens of transformers' greedy answer."""
        tokens = [*prompt]
        for _ in range(count):
            tokens.append(int(expected(self.theirs, tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def init(
        self,
        slot: int,
        tokens: list[int],
        *,
        num_computed: int = 0,
        checkpoint: int = NO_CHECKPOINT,
        shares: int = 0,
    ) -> SlotInit:
        """Return the binding of a slot. Its leading blocks are those of the slot `shares`."""
        self.generations[slot] = generation = self.generations.get(slot, 0) + 1
        common = num_computed // BLOCK_TOKENS
        return slot_init(
            slot,
            tokens,
            generation=generation,
            num_computed=num_computed,
            checkpoint=checkpoint,
            blocks=[*blocks_of(shares)[:common], *blocks_of(slot)[common:]],
        )

    def sampled(self, plan: StepPlan) -> list[int]:
        result = self.runner.step(plan)
        assert result.failed.tolist() == []
        return list(result.tokens.tolist())


def blocks_of(slot: int) -> range:
    return range(1 + slot * MAX_BLOCKS, 1 + (slot + 1) * MAX_BLOCKS)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_requests_continue_from_the_checkpoints_of_another_one(
    tmp_path: Path, model_type: str
) -> None:
    steps = Steps.of(tmp_path, model_type)
    answer, beside = steps.answer(PROMPT, 3), steps.answer(OTHER, 4)
    plan = step_plan(
        bind=[steps.init(0, PROMPT), steps.init(5, OTHER)],
        zero=[*blocks_of(0), *blocks_of(5)],
        rows=[(0, 0, 12, False), (5, 0, 9, True)],
        saves=[(0, 12, 2), (0, 8, 1)],
    )
    assert steps.sampled(plan) == beside[:1]
    plan = step_plan(rows=[(0, 12, 8, True), (5, 9, 1, True)], saves=[(0, 20, 3), (5, 10, 4)])
    assert steps.sampled(plan) == [beside[1], answer[0]]
    known = [*PROMPT, answer[0]]
    plan = step_plan(
        release=[(5, 1)],
        bind=[
            steps.init(2, known, num_computed=20, checkpoint=3),
            steps.init(3, known, num_computed=12, checkpoint=2),
            steps.init(4, PROMPT, num_computed=8, checkpoint=1),
            steps.init(5, [*OTHER, *beside[:2]], num_computed=10, checkpoint=4, shares=5),
        ],
        zero=[block for slot in (2, 3, 4) for block in blocks_of(slot)],
        rows=[
            *((0, 20, 1, True), (2, 20, 1, True), (5, 10, 1, True)),
            *((3, 12, 9, True), (4, 8, 12, True)),
        ],
    )
    assert steps.sampled(plan) == [answer[1], answer[1], beside[2], answer[1], answer[0]]
    plan = step_plan(rows=[*((slot, 21, 1, True) for slot in (0, 2, 3)), (5, 11, 1, True)])
    assert steps.sampled(plan) == [*[answer[2]] * 3, beside[3]]


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize("model_type", RECURRENT)
def test_drafts_change_the_state_only_if_they_are_right(
    tmp_path: Path, model_type: str, right: int
) -> None:
    """The step saves states after the known token, after the first draft and after all three."""
    steps = Steps.of(tmp_path, model_type)
    answer, beside = steps.answer(PROMPT, 6), steps.answer(OTHER, 3)
    plan = step_plan(
        bind=[steps.init(0, PROMPT), steps.init(5, OTHER)],
        zero=[*blocks_of(0), *blocks_of(5)],
        rows=[(0, 0, 20, True), (5, 0, 9, True)],
    )
    assert steps.sampled(plan) == [answer[0], beside[0]]
    drafts = [token if i < right else (token + 1) % VOCAB for i, token in enumerate(answer[1:4])]
    plan = step_plan(
        rows=[(0, 20, 4, True), (5, 9, 1, True)],
        drafts={0: drafts},
        saves=[(0, 21, 1), (0, 22, 2), (0, 24, 3), (5, 10, 4)],
    )
    assert steps.sampled(plan) == [beside[1], *answer[1 : 2 + right]]
    kept = steps.runner.components.slots.checkpoints[STATE]
    is_saved = [not bool(row.isnan().any()) for row in kept]
    assert is_saved == [True, True, right >= 1, right >= 3, True]
    plan = step_plan(rows=[(0, 21 + right, 1, True), (5, 10, 1, True)])
    assert steps.sampled(plan) == [answer[2 + right], beside[2]]
    for checkpoint, size in ((2, 22), (3, 24)):
        if is_saved[checkpoint]:
            tokens = [*PROMPT, *answer][: size + 1]
            plan = step_plan(
                bind=[steps.init(6 + checkpoint, tokens, num_computed=size, checkpoint=checkpoint)],
                zero=blocks_of(6 + checkpoint),
                rows=[(6 + checkpoint, size, 1, True)],
            )
            assert steps.sampled(plan) == [answer[size - 19]]
