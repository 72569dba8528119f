"""A model's own head in the engine's plans: it computes each position of its requests once, and no
answer changes.

The echo worker checks at every step that the entries of all positions that the head has computed
are there, and that it reads nothing of another request.
"""

from __future__ import annotations

import pytest

from engine_core.speculation.draft_policy import RETRY_EVERY
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.worker.steps import StepPlan
from tests.support.engines import Bench, answer, guess_with_accuracy

PROMPT = [5, 6, 7, 8]


def bench(chance: float = 1.0, **options: object) -> Bench:
    options = {"speculation": "mtp", "guess": guess_with_accuracy(chance), **options}
    return Bench(**options)  # type: ignore[arg-type]


def num_requested(plan: StepPlan) -> int:
    return 0 if plan.wanted is None else sum(plan.wanted.tolist())


def uses_head(plan: StepPlan) -> bool:
    return plan.follow_starts is not None


@pytest.mark.parametrize("chance", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_answer_is_the_same_for_any_head(chance: float, depth: int) -> None:
    each = bench(chance, steps_in_flight=depth)
    number = each.add(PROMPT, max_tokens=60, ignore_eos=True)
    each.run()
    assert each.tokens(number) == answer(PROMPT, 60, ignore_eos=True)
    usage = each.usage(number)
    assert usage.accepted_tokens == 60 - len(each.plans)
    assert (usage.accepted_tokens == 0) == (chance == 0)


def test_a_head_that_is_always_right_gives_nine_tokens_per_step() -> None:
    each = bench(max_drafts=8)
    number = each.add(PROMPT, max_tokens=91, ignore_eos=True)
    each.run()
    assert len(each.plans) < 15
    usage = each.usage(number)
    assert usage.draft_tokens == usage.accepted_tokens > 75


def test_the_head_computes_exactly_the_rows_of_its_request() -> None:
    """A chunked prompt, and steps with drafts that are right or wrong."""
    each = bench(0.6, token_budget=8)
    each.add([*range(30)], max_tokens=30, ignore_eos=True)
    each.run()
    assert each.plans[0].row_tokens.tolist() == [8]
    for plan in each.plans:
        assert plan.follow_starts is not None
        assert plan.follow_starts.tolist() == plan.row_starts.tolist()


def test_no_position_after_the_end_is_computed() -> None:
    for max_tokens in range(1, 14):
        each = bench(block_tokens=1, num_blocks=201)
        number = each.add(PROMPT, max_tokens=max_tokens, ignore_eos=True)
        each.run()
        assert len(each.tokens(number)) == max_tokens
        ends = [plan.row_starts.tolist()[0] + plan.row_tokens.tolist()[0] for plan in each.plans]
        assert max(ends) == len(PROMPT) + max_tokens - 1


def test_a_head_that_is_never_right_stops_and_steps_are_planned_ahead() -> None:
    each = bench(0.0, steps_in_flight=2, max_len=512, num_blocks=129)
    number = each.add(PROMPT, max_tokens=200, ignore_eos=True)
    num_ahead = 0
    while each.plan() is not None or each.in_flight:
        each.plan()
        num_ahead += len(each.in_flight) == 2
        each.finish()
    assert each.tokens(number) == answer(PROMPT, 200, ignore_eos=True)
    uses = [uses_head(plan) for plan in each.plans]
    assert 0 < sum(uses) < 20
    assert uses == sorted(uses, reverse=True), "it computes no later position again"
    assert num_ahead > 150


def test_a_head_that_costs_as_much_as_it_saves_is_not_used() -> None:
    for cost, is_used in ((0.1, True), (0.95, False), (3.0, False)):
        each = bench(draft_cost=cost)
        each.add(PROMPT, max_tokens=40, ignore_eos=True)
        each.run()
        assert any(map(num_requested, each.plans)) == is_used
        assert any(map(uses_head, each.plans)) == is_used, "an unused head computes nothing"


def test_a_head_that_was_never_right_is_tried_by_few_requests() -> None:
    each = bench(0.0)
    uses = []
    for n in range(2 * RETRY_EVERY):
        before = len(each.plans)
        each.add([*PROMPT, n], max_tokens=20, ignore_eos=True)
        each.run()
        uses.append(any(map(uses_head, each.plans[before:])))
    assert [n for n, is_used in enumerate(uses) if is_used] == [0, RETRY_EVERY]


def test_the_head_follows_without_drafts_while_a_step_is_full() -> None:
    """Otherwise entries would be missing once the step has fewer rows."""
    each = bench(1.0, max_slots=60, num_blocks=1025, draft_width=16)
    for n in range(60):
        each.add([n, 3], max_tokens=4 if n else 30, ignore_eos=True)
    each.run()
    crowded = [plan for plan in each.plans if len(plan.row_slots) > 50]
    assert sum(map(num_requested, crowded)) == 0
    assert all(map(uses_head, crowded))
    assert sum(map(num_requested, each.plans)) > 0


def test_blocks_are_shared_whether_the_head_has_computed_them_or_not() -> None:
    each = bench(0.0, max_len=128)
    prompt = [*range(40)]
    cached = []
    for n in range(RETRY_EVERY + 1):
        number = each.add([*prompt, n], max_tokens=8, ignore_eos=True)
        each.run()
        cached.append(each.usage(number).cached_tokens)
    assert cached == [0, *[40] * RETRY_EVERY]


def test_a_prompt_without_an_answer_does_not_use_the_head() -> None:
    each = bench()
    each.add([*range(1, 14)], max_tokens=0)
    each.run()
    assert not any(map(uses_head, each.plans))


def test_a_draft_of_the_head_preempts_no_request() -> None:
    each = bench(num_blocks=23, block_tokens=4, max_slots=2)
    numbers = [each.add(PROMPT, max_tokens=40, seed=n, ignore_eos=True) for n in range(2)]
    each.run()
    assert each.engine.stats().num_preemptions == 0
    for seed, number in enumerate(numbers):
        assert each.tokens(number) == answer(PROMPT, 40, seed, ignore_eos=True)


def test_the_worker_loads_the_head_for_this_method_only() -> None:
    worker = WorkerConfig(model="m")
    for speculation in ("none", "ngram", "mtp"):
        config = EngineConfig(worker=worker, speculation=speculation)  # type: ignore[arg-type]
        assert config.worker.draft_head == (speculation == "mtp")


def test_a_draft_model_and_a_group_of_workers_are_refused_with_a_head() -> None:
    with pytest.raises(ValueError, match="must be set together"):
        EngineConfig(worker=WorkerConfig(model="m", draft_model="x"), speculation="mtp")
    with pytest.raises(ValueError, match="tensor_parallel cannot be combined with speculation"):
        EngineConfig(worker=WorkerConfig(model="m"), speculation="mtp", tensor_parallel=2)
