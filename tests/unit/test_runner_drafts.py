"""Rows with drafts say what plain decoding says, token and logprobs, for every parameter.

Plain decoding is the slow twin: one token a step. Beside it the same request runs with drafts
that are right, partly right or wrong, in slots and blocks full of poison.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from protocol.arrays import Int32
from protocol.sampling import SamplingParams
from protocol.steps import StepResult
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_model import (
    VOCAB,
    TinyModel,
    tiny_cache,
    tiny_runner,
    tiny_slots,
)
from worker.slots.table import Poison
from worker.step import Runner

PROMPT = [5, 9, 2, 77, 31]
NUM_NEW = 24
SPECS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.9, logprobs=0),
    SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.0, repetition_penalty=3.0, logprobs=1),
    SamplingParams(temperature=0.0, frequency_penalty=1.9),
    SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=-2.0),
    SamplingParams(temperature=0.8, min_tokens=15, logprobs=2),
    SamplingParams(temperature=1.0, bad_words=[[i] for i in range(0, 97, 4)] + [[1, 3], [5] * 4]),
    SamplingParams(temperature=0.7, allowed_token_ids=[3, 4, 5, 6], bad_words=[[3, 3], [4, 5, 6]]),
    SamplingParams(temperature=1.2, logit_bias={3: 6.0, 50: 5.5}, logprobs=4),
    SamplingParams(temperature=1.4, top_p=0.6, logprob_token_ids=[7, 8], logprobs_of="both"),
    SamplingParams(temperature=1.2, top_k=9, logprobs=4, logprobs_of="sampling"),
]


@dataclass
class DraftedStep:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[object, ...]] = field(default_factory=list)
    steps: int = 0

    def take(self, result: StepResult) -> None:
        self.steps += 1
        self.tokens += result.tokens.tolist()
        if result.logprobs is not None:
            self.logprobs += entries(result)


def entries(result: StepResult) -> list[tuple[object, ...]]:
    """Per token: its row, id, rank and top ids, and then all numbers, rounded as floats may be."""
    columns = result.logprobs
    assert columns is not None
    width, count = columns.top_ids.shape[1], len(columns.ids)
    numbers = [columns.logprobs, columns.top_logprobs, columns.asked, columns.drawn]
    told: list[tuple[object, ...]] = []
    for i in range(count):
        values = []
        for column in filter(None, numbers):
            each = len(column.tolist()) // count
            values += column.tolist()[i * each : (i + 1) * each]
        top = columns.top_ids.tolist()[i * width : (i + 1) * width]
        told.append((columns.ids.tolist()[i], columns.ranks.tolist()[i], top, values))
    return told


def runner_of(model: TinyModel | None = None) -> Runner:
    cache = tiny_cache(40)
    cache.k[:, 1:] = cache.v[:, 1:] = float("nan")
    return tiny_runner(tiny_slots(3, poison=Poison.WILD), cache, model)


def binding(slot: int, params: SamplingParams, seed: int):
    blocks = range(1 + 12 * slot, 13 + 12 * slot)
    stops = list(range(0, VOCAB, 2)) if params.min_tokens else []
    init = slot_init(slot, PROMPT, blocks=blocks, seed=seed, stop_ids=stops, params=params)
    return init, list(blocks)


def plain(params: SamplingParams, seed: int) -> DraftedStep:
    """One token a step."""
    runner, told = runner_of(), DraftedStep()
    init, blocks = binding(0, params, seed)
    told.take(runner.step(step_plan(bind=[init], zero=blocks, rows=[(0, 0, len(PROMPT), True)])))
    while len(told.tokens) < NUM_NEW:
        told.take(runner.step(step_plan(rows=[(0, len(PROMPT) + len(told.tokens) - 1, 1, True)])))
    return told


def guessed(
    params: SamplingParams, seed: int, answer: list[int], rng: random.Random
) -> DraftedStep:
    """The same in a slot that had another occupant, with drafts, some of which are wrong, and with
    a neighbour that has none."""
    runner, told = runner_of(), DraftedStep()
    other, other_blocks = binding(1, SamplingParams(temperature=1.0), seed=9)
    before, blocks = binding(2, SamplingParams(temperature=0.5, repetition_penalty=2.0), seed=8)
    rows = [(1, 0, len(PROMPT), True), (2, 0, len(PROMPT), True)]
    runner.step(step_plan(bind=[other, before], zero=other_blocks + blocks, rows=rows))
    init, _ = binding(2, params, seed)
    init = type(init)(
        **{name: getattr(init, name) for name in init.__struct_fields__} | {"generation": 2}
    )
    at = len(PROMPT)
    plan = step_plan(
        release=[2], bind=[init], zero=blocks, rows=[(2, 0, at, True), (1, at, 1, True)]
    )
    result = runner.step(plan)
    told.take(only_last(result))
    num_other = 2
    while len(told.tokens) < NUM_NEW:
        done = len(told.tokens)
        drafts = answer[done : done + rng.randrange(min(7, NUM_NEW - done))]
        if drafts and rng.random() < 0.5:
            wrong = rng.randrange(len(drafts))
            drafts[wrong] = (drafts[wrong] + 1 + rng.randrange(VOCAB - 1)) % VOCAB
        rows = [
            (1, at + num_other - 1, 1, True),
            (2, at + done - 1, 1 + len(drafts), True),
        ]
        result = runner.step(step_plan(rows=rows, drafts={2: drafts}))
        assert result.counts is not None
        told.take(only_last(result))
        num_other += 1
        assert result.counts.tolist() == [1, len(told.tokens) - done]
    return told


def only_last(result: StepResult) -> StepResult:
    """Without the neighbour's token, which is the first; it asks for no logprobs."""
    return replace(result, tokens=Int32.of(result.tokens.tolist()[1:]))


@pytest.mark.parametrize("params", SPECS, ids=str)
def test_with_drafts_the_same_is_said_with_the_same_logprobs(params: SamplingParams) -> None:
    steps = 0
    for seed in range(4):
        slow = plain(params, seed)
        fast = guessed(params, seed, slow.tokens, random.Random(seed))
        steps += fast.steps
        assert fast.tokens == slow.tokens
        assert len(fast.logprobs) == len(slow.logprobs)
        for one, two in zip(slow.logprobs, fast.logprobs, strict=True):
            assert one[:3] == two[:3]
            assert one[3] == pytest.approx(two[3], rel=1e-4, abs=1e-5)
    assert steps < 4 * NUM_NEW * 0.7, "drafts that are right save steps"


class BrokenDraftModel(TinyModel):
    """The token 90 turns every number it touches into NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding[90] = float("nan")


def test_a_row_whose_drafts_are_no_numbers_fails_alone() -> None:
    params = SamplingParams(temperature=0.0)
    runner = runner_of(BrokenDraftModel())
    binds, blocks = zip(*(binding(slot, params, 0) for slot in range(2)), strict=True)
    rows = [(0, 0, 7, True), (1, 0, 7, True)]
    drafts = {0: [90, 4], 1: [4, 4]}
    plan = step_plan(bind=binds, zero=[*blocks[0], *blocks[1]], rows=rows, drafts=drafts)
    result = runner.step(plan)
    assert result.counts is not None
    assert (result.failed.tolist(), result.counts.tolist()) == ([0], [1, 1])
    assert result.tokens.tolist() == [0, *plain(params, 0).tokens[:1]]


@pytest.mark.parametrize(
    ("rows", "drafts"),
    [
        ([(0, 0, 5, False)], {0: [1]}),
        ([(0, 4, 1, True)], {0: [1]}),
        ([(0, 3, 2, True)], {0: [1, 2]}),
    ],
)
def test_drafts_without_a_known_token_or_a_sample_are_refused(rows, drafts) -> None:
    runner = runner_of()
    init, blocks = binding(0, SPECS[0], 0)
    with pytest.raises(ValueError, match="drafts must follow"):
        runner.step(step_plan(bind=[init], zero=blocks, rows=rows, drafts=drafts))
