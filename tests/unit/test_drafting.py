"""The draft model: what it guesses is what it would say by itself behind the tokens that are known,
whatever way its keys and values came into the cache."""

from __future__ import annotations

import pytest
import torch

from protocol.sampling import SamplingParams
from protocol.steps import StepResult
from tests.support.plans import GREEDY, slot_init, step_plan
from tests.support.tiny_model import CPU, TinyModel, tiny_cache, tiny_runner, tiny_slots
from worker.slots.table import Poison
from worker.step import Runner

PROMPT = [5, 9, 2, 77, 31]
OTHER = [8, 3, 90]
BLOCKS = 11


def runner_of(draft: TinyModel | None = None) -> Runner:
    """Slots and both caches hold NaN where nobody has been."""
    cache = tiny_cache(40)
    runner = tiny_runner(tiny_slots(3, poison=Poison.WILD), cache, draft=draft or TinyModel(seed=8))
    for each in (cache, runner.draft_model.cache):  # type: ignore[union-attr]
        each.k[:, 1:] = each.v[:, 1:] = float("nan")
    return runner


def binding(slot: int, tokens: list[int], **more):
    blocks = list(range(1 + BLOCKS * slot, 1 + BLOCKS * (slot + 1)))
    return slot_init(slot, tokens, blocks=blocks, **more), blocks


def alone(model: TinyModel, tokens: list[int], count: int) -> list[int]:
    """The slow twin: the model's own greedy answer, one token a step."""
    runner = tiny_runner(tiny_slots(1), tiny_cache(1 + BLOCKS), model)
    init, blocks = binding(0, tokens)
    said = runner.step(
        step_plan(bind=[init], zero=blocks, rows=[(0, 0, len(tokens), True)])
    ).tokens.tolist()
    while len(said) < count:
        plan = step_plan(rows=[(0, len(tokens) + len(said) - 1, 1, True)])
        said += runner.step(plan).tokens.tolist()
    return said


def proposed(result: StepResult) -> list[int]:
    assert result.proposed is not None
    return result.proposed.tolist()


def test_behind_a_prompt_it_guesses_what_it_would_say_itself() -> None:
    init, blocks = binding(0, PROMPT)
    plan = step_plan(bind=[init], zero=blocks, rows=[(0, 0, 5, True)], follow={0: (0, 4)})
    result = runner_of().step(plan)
    (token,) = result.tokens.tolist()
    assert proposed(result) == alone(TinyModel(seed=8), [*PROMPT, token], 4)
    assert alone(TinyModel(), [*PROMPT, token], 4) != proposed(result)


def test_it_says_nothing_else_than_a_step_without_it() -> None:
    init, blocks = binding(0, PROMPT, params=SamplingParams(temperature=1.0, logprobs=3))
    rows = [(0, 0, 5, True)]
    plain = runner_of().step(step_plan(bind=[init], zero=blocks, rows=rows))
    plan = step_plan(bind=[init], zero=blocks, rows=rows, follow={0: (0, 4)})
    result = runner_of().step(plan)
    assert (result.tokens, result.logprobs) == (plain.tokens, plain.logprobs)
    assert plain.proposed is None


def test_rows_want_different_numbers_and_some_none_or_are_not_followed() -> None:
    """Slot 1 has a prompt that is not complete, slot 2 nobody follows."""
    runner = runner_of()
    (one, a), (two, b), (three, c) = (
        binding(slot, tokens) for slot, tokens in enumerate((PROMPT, [*OTHER, 1, 2], OTHER))
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
    said = result.tokens.tolist()  # rows of one token come first
    guesses = proposed(result)
    assert guesses[:1] == alone(model, [*PROMPT, first, said[0]], 1)
    assert guesses[1:4] == alone(model, [*OTHER, third, said[1]], 3), "after it lagged behind"
    assert guesses[4:] == alone(model, [*OTHER, 1, 2, said[2]], 5)


@pytest.mark.parametrize("right", range(5))
def test_behind_drafts_of_which_some_are_wrong_it_begins_where_they_were_right(right: int) -> None:
    """What it had computed for its own guesses is computed again, or was right."""
    runner, model = runner_of(), TinyModel(seed=8)
    init, blocks = binding(0, PROMPT)
    plan = step_plan(bind=[init], zero=blocks, rows=[(0, 0, 5, True)], follow={0: (0, 4)})
    known = [*PROMPT, *runner.step(plan).tokens.tolist()]
    answer = alone(TinyModel(), PROMPT, 8)[1:]
    drafts = answer[:right] + [(token + 1) % 97 for token in answer[right:4]]
    plan = step_plan(rows=[(0, 5, 5, True)], drafts={0: drafts}, follow={0: (6, 3)})
    result = runner.step(plan)
    said = result.tokens.tolist()
    assert said == answer[: right + 1]
    assert proposed(result) == alone(model, known + said, 3)


def test_blocks_that_are_shared_have_its_keys_too() -> None:
    """A request that found its prompt's blocks is followed from there."""
    runner, tokens = runner_of(), [*PROMPT, 4, 8, 15, 16]
    init, blocks = binding(0, tokens)
    runner.step(step_plan(bind=[init], zero=blocks, rows=[(0, 0, 9, True)], follow={0: (0, 1)}))
    found = slot_init(1, tokens, num_computed=8, blocks=[*blocks[:2], 30, 31], params=GREEDY)
    plan = step_plan(bind=[found], zero=[30, 31], rows=[(1, 8, 1, True)], follow={1: (8, 3)})
    result = runner.step(plan)
    assert proposed(result) == alone(TinyModel(seed=8), [*tokens, *result.tokens.tolist()], 3)


def test_a_matrix_of_more_rows_than_there_are_tokens_guesses_tokens_only() -> None:
    wide = TinyModel(vocab=130, seed=8)
    wide.head[:, 97:] = 100 * wide.head[:, :33]
    init, blocks = binding(0, PROMPT)
    plan = step_plan(bind=[init], zero=blocks, rows=[(0, 0, 5, True)], follow={0: (0, 6)})
    assert max(proposed(runner_of(wide).step(plan))) < 97


@pytest.mark.parametrize(
    ("follow", "says"),
    [
        ({0: (-1, 2)}, "can have proposals"),
        ({0: (0, -1)}, "can have proposals"),
        ({0: (6, 1)}, "unknown tokens"),
        ({0: (5, 0)}, "unknown tokens"),
        ({1: (0, 1)}, "can have proposals"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(follow, says) -> None:
    (one, a), (two, b) = binding(0, PROMPT), binding(1, OTHER)
    plan = step_plan(
        bind=[one, two], zero=a + b, rows=[(0, 0, 5, True), (1, 0, 2, False)], follow=follow
    )
    with pytest.raises(ValueError, match=says):
        runner_of().step(plan)


def test_a_worker_without_a_draft_model_refuses_to_follow() -> None:
    init, blocks = binding(0, PROMPT)
    plan = step_plan(bind=[init], zero=blocks, rows=[(0, 0, 5, True)], follow={0: (0, 1)})
    with pytest.raises(ValueError, match="no draft model"):
        tiny_runner(tiny_slots(1), tiny_cache(1 + BLOCKS)).step(plan)


def test_the_tiny_models_differ() -> None:
    assert not torch.equal(TinyModel(device=CPU).head, TinyModel(device=CPU, seed=8).head)
