"""Rows with drafts give the tokens and logprobs of plain decoding, for all parameters.

Plain decoding, with one token per step, is the slow reference. The same request also runs with
drafts that are right, partly right or wrong, in slots and blocks that are full of poison.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.engine.sampling import DryBreaker, SamplingParams
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepResult
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.tiny_model import VOCAB, TinyModel, tiny_cache, tiny_runner, tiny_slots
from worker.sampling.verify import NO_DRAFT, VerifiedDrafts, verify
from worker.step.runner import Runner
from worker.step.slot_registry import Poison

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
    SamplingParams(temperature=1.5, typical_p=0.4, logprobs=4, logprobs_of="sampling"),
    SamplingParams(temperature=1.3, xtc_probability=0.5, xtc_threshold=0.02, top_n_sigma=1.5),
    SamplingParams(temperature=1.0, dynatemp_range=0.8, samplers=["min_p", "temperature"]),
    SamplingParams(temperature=1.3, mirostat=1, mirostat_tau=2.5, mirostat_eta=0.7),
    SamplingParams(
        temperature=0.9, mirostat=2, mirostat_tau=2.0, logprobs=4, logprobs_of="sampling"
    ),
    SamplingParams(
        temperature=0.7, dry_multiplier=2.0, dry_allowed_length=1, dry_breakers=[DryBreaker([5])]
    ),
]


@dataclass
class DraftedAnswer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[object, ...]] = field(default_factory=list)
    steps: int = 0

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.tokens += result.tokens.tolist()
        if result.logprobs is not None:
            self.logprobs += entries(result)


def entries(result: StepResult) -> list[tuple[object, ...]]:
    """Return for each token its id, its rank, the top ids, and all its logprobs."""
    columns = result.logprobs
    width, count = columns.top_ids.shape[1], len(columns.ids)
    numbers = [columns.logprobs, columns.top_logprobs, columns.asked, columns.drawn]
    found: list[tuple[object, ...]] = []
    for i in range(count):
        values = []
        for column in filter(None, numbers):
            each = len(column.tolist()) // count
            values += column.tolist()[i * each : (i + 1) * each]
        top = columns.top_ids.tolist()[i * width : (i + 1) * width]
        found.append((columns.ids.tolist()[i], columns.ranks.tolist()[i], top, values))
    return found


def runner_of(model: TinyModel | None = None) -> Runner:
    cache = tiny_cache(40)
    cache.k[:, 1:] = cache.v[:, 1:] = float("nan")
    return tiny_runner(tiny_slots(3, poison=Poison.WILD), cache, model)


def binding(slot: int, params: SamplingParams, seed: int):
    blocks = range(1 + 12 * slot, 13 + 12 * slot)
    stops = list(range(0, VOCAB, 2)) if params.min_tokens else []
    init = slot_init(slot, PROMPT, blocks=blocks, seed=seed, stop_ids=stops, params=params)
    return init, list(blocks)


def plain(params: SamplingParams, seed: int) -> DraftedAnswer:
    """Return the answer of plain decoding: one token per step."""
    runner, answer = runner_of(), DraftedAnswer()
    init, blocks = binding(0, params, seed)
    answer.add(runner.step(step_plan(bind=[init], zero=blocks, rows=[(0, 0, len(PROMPT), True)])))
    while len(answer.tokens) < NUM_NEW:
        answer.add(
            runner.step(step_plan(rows=[(0, len(PROMPT) + len(answer.tokens) - 1, 1, True)]))
        )
    return answer


def with_drafts(
    params: SamplingParams, seed: int, answer: list[int], rng: random.Random
) -> DraftedAnswer:
    """Return the answer decoded with drafts, some of which are wrong. Its slot had another occupant
    before, and a neighbour in the batch has no drafts."""
    runner, drafted = runner_of(), DraftedAnswer()
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
        release=[(2, 1)], bind=[init], zero=blocks, rows=[(2, 0, at, True), (1, at, 1, True)]
    )
    result = runner.step(plan)
    drafted.add(only_last(result))
    num_other = 2
    while len(drafted.tokens) < NUM_NEW:
        done = len(drafted.tokens)
        drafts = answer[done : done + rng.randrange(min(7, NUM_NEW - done))]
        if drafts and rng.random() < 0.5:
            wrong = rng.randrange(len(drafts))
            drafts[wrong] = (drafts[wrong] + 1 + rng.randrange(VOCAB - 1)) % VOCAB
        rows = [(1, at + num_other - 1, 1, True), (2, at + done - 1, 1 + len(drafts), True)]
        result = runner.step(step_plan(rows=rows, drafts={2: drafts}))
        drafted.add(only_last(result))
        num_other += 1
        assert result.counts.tolist() == [1, len(drafted.tokens) - done]
    return drafted


def only_last(result: StepResult) -> StepResult:
    """Return the result without the neighbour's token, which is the first. The neighbour requests
    no logprobs."""
    return replace(result, tokens=Int32.of(result.tokens.tolist()[1:]))


@pytest.mark.parametrize("params", SPECS, ids=str)
def test_drafts_change_neither_tokens_nor_logprobs(params: SamplingParams) -> None:
    steps = 0
    for seed in range(4):
        slow = plain(params, seed)
        fast = with_drafts(params, seed, slow.tokens, random.Random(seed))
        steps += fast.steps
        assert fast.tokens == slow.tokens
        assert len(fast.logprobs) == len(slow.logprobs)
        for one, two in zip(slow.logprobs, fast.logprobs, strict=True):
            assert one[:3] == two[:3]
            assert one[3] == pytest.approx(two[3], rel=1e-4, abs=1e-5)
    assert steps < 4 * NUM_NEW * 0.7, "right drafts save steps"


class BrokenDraftModel(TinyModel):
    """A model in which token 90 turns every number that it reaches into NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding[90] = float("nan")


def test_a_row_with_non_finite_drafts_fails_alone() -> None:
    params = SamplingParams(temperature=0.0)
    runner = runner_of(BrokenDraftModel())
    binds, blocks = zip(*(binding(slot, params, 0) for slot in range(2)), strict=True)
    rows = [(0, 0, 7, True), (1, 0, 7, True)]
    drafts = {0: [90, 4], 1: [4, 4]}
    plan = step_plan(bind=binds, zero=[*blocks[0], *blocks[1]], rows=rows, drafts=drafts)
    result = runner.step(plan)
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


# ---- verify
def row_by_row(rows: list[list[tuple[int, bool, int]]]) -> tuple[list[int], list[int]]:
    """Return the places and counts that `verify` should return. `rows` holds (token, is finite,
    draft) for each place."""
    places: list[int] = []
    counts: list[int] = []
    place = 0
    for row in rows:
        count = 1
        for token, finite, draft in row[:-1]:
            if token != draft or not finite:
                break
            count += 1
        places += range(place, place + count)
        counts.append(count)
        place += len(row)
    return places, counts


def verified(rows: list[list[tuple[int, bool, int]]]) -> VerifiedDrafts:
    tokens, finite, drafts = zip(*(place for row in rows for place in row), strict=True)
    return verify(np.array(tokens), np.array(finite), np.array(drafts))


SMALL = st.tuples(st.integers(0, 1), st.sampled_from([True, True, True, False]), st.integers(0, 1))
ROW = st.lists(SMALL, min_size=1, max_size=5).map(
    lambda row: [*row[:-1], (row[-1][0], row[-1][1], NO_DRAFT)]
)


@given(st.lists(ROW, min_size=1, max_size=6))
def test_verifying_all_rows_at_once_equals_row_by_row(
    rows: list[list[tuple[int, bool, int]]],
) -> None:
    kept = verified(rows)
    assert (kept.places.tolist(), kept.counts.tolist()) == row_by_row(rows)
    assert kept.last.tolist() == [sum(kept.counts[: i + 1]) - 1 for i in range(len(rows))]


def test_no_draft_after_a_non_finite_place_is_accepted() -> None:
    kept = verified([[(7, True, 7), (0, False, 0), (5, True, NO_DRAFT)]])
    assert kept.counts.tolist() == [2]


# ---- the draft model
OTHER = [8, 3, 90]
BLOCKS = 11


def runner_with_draft_model(draft: TinyModel | None = None) -> Runner:
    """Return a runner whose slots and caches hold NaN where nothing was written."""
    cache = tiny_cache(40)
    runner = tiny_runner(tiny_slots(3, poison=Poison.WILD), cache, draft=draft or TinyModel(seed=8))
    for each in (cache, runner.draft_model.cache):  # type: ignore[union-attr]
        each.k[:, 1:] = each.v[:, 1:] = float("nan")
    return runner


def bound_to(slot: int, tokens: list[int], **more):
    blocks = list(range(1 + BLOCKS * slot, 1 + BLOCKS * (slot + 1)))
    return slot_init(slot, tokens, blocks=blocks, **more), blocks


def alone(model: TinyModel, tokens: list[int], count: int) -> list[int]:
    """Return the model's greedy answer, decoded with one token per step."""
    runner = tiny_runner(tiny_slots(1), tiny_cache(1 + BLOCKS), model)
    init, blocks = bound_to(0, tokens)
    answer = runner.step(
        step_plan(bind=[init], zero=blocks, rows=[(0, 0, len(tokens), True)])
    ).tokens.tolist()
    while len(answer) < count:
        plan = step_plan(rows=[(0, len(tokens) + len(answer) - 1, 1, True)])
        answer += runner.step(plan).tokens.tolist()
    return answer


def proposed(result: StepResult) -> list[int]:
    return result.proposed.tolist()


def test_the_draft_model_proposes_its_own_greedy_answer() -> None:
    init, blocks = bound_to(0, PROMPT)
    plan = step_plan(bind=[init], zero=blocks, rows=[(0, 0, 5, True)], follow={0: (0, 4)})
    result = runner_with_draft_model().step(plan)
    (token,) = result.tokens.tolist()
    assert proposed(result) == alone(TinyModel(seed=8), [*PROMPT, token], 4)
    assert alone(TinyModel(), [*PROMPT, token], 4) != proposed(result)


def test_a_step_with_a_draft_model_has_the_same_tokens_and_logprobs() -> None:
    init, blocks = bound_to(0, PROMPT, params=SamplingParams(temperature=1.0, logprobs=3))
    rows = [(0, 0, 5, True)]
    plain = runner_with_draft_model().step(step_plan(bind=[init], zero=blocks, rows=rows))
    plan = step_plan(bind=[init], zero=blocks, rows=rows, follow={0: (0, 4)})
    result = runner_with_draft_model().step(plan)
    assert (result.tokens, result.logprobs) == (plain.tokens, plain.logprobs)
    assert plain.proposed is None


def test_rows_request_different_numbers_of_proposals() -> None:
    """Slot 1 has an incomplete prompt. The draft model computes nothing for slot 2 in the first
    step."""
    runner = runner_with_draft_model()
    (one, a), (two, b), (three, c) = (
        bound_to(slot, tokens) for slot, tokens in enumerate((PROMPT, [*OTHER, 1, 2], OTHER))
    )
    rows = [(0, 0, 5, True), (1, 0, 3, False), (2, 0, 3, True)]
    follow = {0: (0, 2), 1: (0, 0)}
    result = runner.step(
        step_plan(bind=[one, two, three], zero=a + b + c, rows=rows, follow=follow)
    )
    first, third = result.tokens.tolist()
    model = TinyModel(seed=8)
    assert proposed(result) == alone(model, [*PROMPT, first], 2)
    rows = [(0, 5, 1, True), (1, 3, 2, True), (2, 3, 1, True)]
    follow = {0: (6, 1), 1: (3, 5), 2: (0, 3)}
    result = runner.step(step_plan(rows=rows, follow=follow))
    tokens = result.tokens.tolist()  # rows of one token come first
    proposals = proposed(result)
    assert proposals[:1] == alone(model, [*PROMPT, first, tokens[0]], 1)
    assert proposals[1:4] == alone(model, [*OTHER, third, tokens[1]], 3), (
        "after the draft model lagged behind"
    )
    assert proposals[4:] == alone(model, [*OTHER, 1, 2, tokens[2]], 5)


@pytest.mark.parametrize("right", range(5))
def test_the_draft_model_continues_after_the_last_right_draft(right: int) -> None:
    """K/V that the draft model computed for wrong proposals is computed again."""
    runner, model = runner_with_draft_model(), TinyModel(seed=8)
    init, blocks = bound_to(0, PROMPT)
    plan = step_plan(bind=[init], zero=blocks, rows=[(0, 0, 5, True)], follow={0: (0, 4)})
    known = [*PROMPT, *runner.step(plan).tokens.tolist()]
    answer = alone(TinyModel(), PROMPT, 8)[1:]
    drafts = answer[:right] + [(token + 1) % 97 for token in answer[right:4]]
    plan = step_plan(rows=[(0, 5, 5, True)], drafts={0: drafts}, follow={0: (6, 3)})
    result = runner.step(plan)
    tokens = result.tokens.tolist()
    assert tokens == answer[: right + 1]
    assert proposed(result) == alone(model, known + tokens, 3)


def test_shared_blocks_hold_the_draft_models_keys() -> None:
    """If the prompt's blocks are in the prefix cache, the draft model continues after them."""
    runner, tokens = runner_with_draft_model(), [*PROMPT, 4, 8, 15, 16]
    init, blocks = bound_to(0, tokens)
    runner.step(step_plan(bind=[init], zero=blocks, rows=[(0, 0, 9, True)], follow={0: (0, 1)}))
    found = slot_init(1, tokens, num_computed=8, blocks=[*blocks[:2], 30, 31], params=GREEDY)
    plan = step_plan(bind=[found], zero=[30, 31], rows=[(1, 8, 1, True)], follow={1: (8, 3)})
    result = runner.step(plan)
    assert proposed(result) == alone(TinyModel(seed=8), [*tokens, *result.tokens.tolist()], 3)


def test_a_padded_draft_vocabulary_proposes_only_real_tokens() -> None:
    wide = TinyModel(vocab=130, seed=8)
    wide.head[:, 97:] = 100 * wide.head[:, :33]
    init, blocks = bound_to(0, PROMPT)
    plan = step_plan(bind=[init], zero=blocks, rows=[(0, 0, 5, True)], follow={0: (0, 6)})
    assert max(proposed(runner_with_draft_model(wide).step(plan))) < 97


@pytest.mark.parametrize(
    ("follow", "message"),
    [
        ({0: (-1, 2)}, "can have proposals"),
        ({0: (0, -1)}, "can have proposals"),
        ({0: (6, 1)}, "unknown tokens"),
        ({0: (5, 0)}, "unknown tokens"),
        ({1: (0, 1)}, "can have proposals"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(follow, message) -> None:
    (one, a), (two, b) = bound_to(0, PROMPT), bound_to(1, OTHER)
    plan = step_plan(
        bind=[one, two], zero=a + b, rows=[(0, 0, 5, True), (1, 0, 2, False)], follow=follow
    )
    with pytest.raises(ValueError, match=message):
        runner_with_draft_model().step(plan)


def test_a_worker_without_a_draft_model_refuses_plans_that_use_one() -> None:
    init, blocks = bound_to(0, PROMPT)
    plan = step_plan(bind=[init], zero=blocks, rows=[(0, 0, 5, True)], follow={0: (0, 1)})
    with pytest.raises(ValueError, match="no draft model"):
        tiny_runner(tiny_slots(1), tiny_cache(1 + BLOCKS)).step(plan)
