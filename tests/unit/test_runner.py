"""One step: what it does in which order, and what it tells."""

from __future__ import annotations

import pytest
import torch

from protocol.sampling import SamplingParams
from tests.support.plans import slot_init, step_plan
from tests.support.tiny_model import TinyModel, tiny_cache, tiny_runner, tiny_slots
from worker.slots.table import Poison

PROMPT = [5, 9, 2, 77, 31]


def runner_of(model: TinyModel | None = None, *, max_slots: int = 3):
    return tiny_runner(tiny_slots(max_slots, poison=Poison.WILD), tiny_cache(20), model)


def bound(slot: int, tokens: list[int] = PROMPT, **more):
    return slot_init(slot, tokens, blocks=range(1 + 4 * slot, 5 + 4 * slot), **more)


def test_a_sampled_token_is_the_next_input_without_ever_being_sent_back():
    runner = runner_of()
    said = list(PROMPT)
    plan = step_plan(bind=[bound(0)], rows=[(0, 0, 5, True)])
    for position in range(5, 10):
        said += runner.step(plan).tokens.tolist()
        plan = step_plan(rows=[(0, position, 1, True)])
    whole = runner_of()
    plan = step_plan(bind=[bound(1, said[:-1])], rows=[(1, 0, len(said) - 1, True)])
    assert whole.step(plan).tokens.tolist() == said[-1:]


def test_a_slot_may_change_hands_within_one_plan():
    runner = runner_of(max_slots=1)
    runner.step(step_plan(bind=[bound(0, [8] * 9)], rows=[(0, 0, 9, True)]))
    plan = step_plan(
        release=[0], bind=[bound(0, generation=2)], zero=[1, 2], rows=[(0, 0, 5, True)]
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


def test_a_step_may_only_release_or_compute_without_sampling():
    runner = runner_of()
    result = runner.step(step_plan(7, bind=[bound(0)], rows=[(0, 0, 4, False)]))
    assert (result.step, result.tokens.tolist(), result.logprobs) == (7, [], None)
    result = runner.step(step_plan(8, release=[0]))
    assert (result.step, result.tokens.tolist(), result.failed.tolist()) == (8, [], [])


def test_tokens_come_in_the_order_of_the_sampled_rows():
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
    """The token 90 turns every number it touches into NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding[90] = float("nan")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_logits_are_not_finite_fails_alone(temperature):
    params = SamplingParams(temperature=temperature, logprobs=2)
    binds = [bound(0, params=params), bound(1, [3, 90], params=params), bound(2, params=params)]
    rows = [(0, 0, 5, True), (1, 0, 2, True), (2, 0, 5, True)]
    result = runner_of(BrokenModel()).step(step_plan(bind=binds, rows=rows))
    sound = runner_of().step(step_plan(bind=[binds[0]], rows=[rows[0]]))
    assert result.failed.tolist() == [1]
    assert result.tokens.tolist() == [*sound.tokens.tolist(), 0, *sound.tokens.tolist()]
    assert result.logprobs.rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (step_plan(release=[1]), "slot 1 is free"),
        (step_plan(extend=[(1, 0, 3)]), "free slots"),
        (step_plan(bind=[bound(0, generation=5)]), "already bound"),
    ],
)
def test_a_plan_that_contradicts_the_slots_is_refused(plan, says):
    runner = runner_of()
    runner.step(step_plan(bind=[bound(0)], rows=[(0, 0, 5, True)]))
    with pytest.raises(ValueError, match=says):
        runner.step(plan)


def test_nothing_of_a_step_can_require_a_gradient():
    model = TinyModel()
    model.embedding.requires_grad_()
    runner = runner_of(model)
    runner.step(step_plan(bind=[bound(0)], rows=[(0, 0, 5, True)]))
    found = [*runner._slots.tensors(), runner._cache.k, runner._cache.v]
    assert not any(tensor.requires_grad for tensor in found)
    assert isinstance(found[0], torch.Tensor)
