"""A model's own head in the engine's plans: it computes all positions of its requests, in few
steps, and no answer changes.

The echo worker checks at every step that the entries of all positions that the head has computed
are there, and that it reads nothing of another request.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine_core.speculation.draft_policy import RETRY_EVERY
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.worker.steps import MAX_HEAD_LAG
from tests.support.engines import (
    Bench,
    answer,
    guess_with_accuracy,
    num_head_entries,
    num_requested,
    proposer_computes,
)
from tests.support.plans import step_plan
from worker.batch.batch import read_rows
from worker.draft.head import read_head_work

PROMPT = [5, 6, 7, 8]


def bench(chance: float = 1.0, **options: object) -> Bench:
    options = {"speculation": "mtp", "guess": guess_with_accuracy(chance), **options}
    return Bench(**options)  # type: ignore[arg-type]


def test_the_head_computes_a_prompt_in_the_steps_of_the_model() -> None:
    each = bench(0.6, token_budget=8)
    each.add([*range(30)], max_tokens=30, ignore_eos=True)
    each.run()
    chunks = [plan for plan in each.plans if plan.row_starts.tolist()[0] < 30]
    assert [plan.row_tokens.tolist() for plan in chunks] == [[8], [8], [8], [6]]
    for plan in chunks:
        assert plan.follow_starts is not None
        assert plan.follow_starts.tolist() == plan.row_starts.tolist()


def test_the_head_computes_an_answer_when_drafts_are_requested() -> None:
    each = bench(0.6, steps_in_flight=2)
    each.add([1, 2], max_tokens=200, ignore_eos=True)
    each.run()
    follows = [plan.follow_starts is not None for plan in each.plans]
    assert follows == [num_requested(plan) > 0 for plan in each.plans]


def test_a_head_that_is_never_right_stops_and_steps_are_planned_ahead() -> None:
    each = bench(0.0, steps_in_flight=2, max_len=512, num_blocks=129)
    number = each.add(PROMPT, max_tokens=200, ignore_eos=True)
    num_ahead = 0
    while each.plan() is not None or each.in_flight:
        each.plan()
        num_ahead += len(each.in_flight) == 2
        each.finish()
    assert each.tokens(number) == answer(PROMPT, 200, ignore_eos=True)
    uses = [proposer_computes(plan) for plan in each.plans]
    assert 0 < sum(uses) < 20
    assert uses == sorted(uses, reverse=True), "it computes no later position again"
    assert num_ahead > 150


def test_the_head_has_no_work_in_a_full_step_and_continues_later() -> None:
    """It computes what it lacks if that is little. Otherwise, the first entries are missing."""
    for length in (MAX_HEAD_LAG - 4, 50):
        each = bench(1.0, max_slots=60, num_blocks=1025, draft_width=16, max_len=128)
        for n in range(60):
            each.add([n, 3], max_tokens=length if n else 80, ignore_eos=True)
        each.run()
        decodes = [plan for plan in each.plans if plan.num_decodes == len(plan.row_slots)]
        assert not any(proposer_computes(plan) for plan in decodes if len(plan.row_slots) > 50)
        late = next(plan for plan in decodes if proposer_computes(plan))
        assert late.follow_starts is not None
        lag = late.row_starts.tolist()[0] - late.follow_starts.tolist()[0]
        assert lag == MAX_HEAD_LAG if length == 50 else 0 < lag < MAX_HEAD_LAG
        assert sum(map(num_requested, each.plans)) > 0


def test_a_step_has_no_more_entries_than_the_token_budget() -> None:
    """Many requests get no drafts because steps are full. Then a prompt gives the head work."""
    budget = 64
    each = bench(1.0, max_slots=56, num_blocks=1025, max_len=128, token_budget=budget)
    for n in range(55):
        each.add([n, 3], max_tokens=80, ignore_eos=True)
    for _ in range(40):
        each.plan()
        each.finish()
    each.add([*range(30)], max_tokens=40, ignore_eos=True)
    each.run()
    numbers = list(map(num_head_entries, each.plans))
    assert 0 < max(numbers) <= budget
    late = [plan for plan in each.plans if proposer_computes(plan)]
    assert any(len(plan.row_slots) > 50 for plan in late)


def test_more_drafts_than_hidden_states_are_refused() -> None:
    EngineConfig(speculation="mtp", max_drafts=MAX_HEAD_LAG, worker=WorkerConfig(model="m"))
    with pytest.raises(ValueError, match="max_drafts must be at most 16"):
        EngineConfig(speculation="mtp", max_drafts=MAX_HEAD_LAG + 1, worker=WorkerConfig(model="m"))


@pytest.mark.parametrize("lag", [-1, MAX_HEAD_LAG + 1])
def test_the_worker_refuses_positions_whose_hidden_states_it_does_not_have(lag: int) -> None:
    plan = step_plan(rows=[(0, 30, 1, True)], follow={0: (30 - lag, 0)})
    with pytest.raises(ValueError, match="starts with a row, or at most 16 tokens before"):
        read_head_work(plan, read_rows(plan), np.array([32]), 64)


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
    assert not any(map(proposer_computes, each.plans))


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
