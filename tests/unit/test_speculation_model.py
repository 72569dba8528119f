"""The draft model in the engine's plans: when it computes, when it drafts, and that no answer
changes.

The echo worker checks at every step that the K/V of all earlier tokens exists.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine_core.schedule.drafting import MAX_DRAFT_LAG
from engine_core.speculation.draft_policy import RETRY_EVERY
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepPlan
from tests.support.engines import (
    Bench,
    answer,
    drafts_of,
    guess_with_accuracy,
    num_requested,
    proposer_computes,
)

PROMPT = [5, 6, 7, 8]


def bench(chance: float = 1.0, **options: object) -> Bench:
    options = {"speculation": "model", "guess": guess_with_accuracy(chance), **options}
    return Bench(**options)  # type: ignore[arg-type]


# ---- how often the draft model is used
def test_a_draft_model_that_is_never_right_is_used_rarely() -> None:
    each = bench(0.0, steps_in_flight=2, max_len=512, num_blocks=129)
    number = each.add(PROMPT, max_tokens=400, ignore_eos=True)
    each.run()
    assert each.tokens(number) == answer(PROMPT, 400, ignore_eos=True)
    assert len(each.plans) == 400
    num_drafting, num_computing = (
        sum(map(num_requested, each.plans)),
        sum(map(proposer_computes, each.plans)),
    )
    assert 5 < num_drafting < 25
    assert num_computing < num_drafting + 400 / MAX_DRAFT_LAG


def test_a_draft_model_that_is_rarely_used_does_not_compute_prompts() -> None:
    each = bench(0.0, max_len=128)
    uses = []
    for n in range(RETRY_EVERY + 1):
        before = len(each.plans)
        each.add([*range(n, n + 60)], max_tokens=8, ignore_eos=True)
        each.run()
        uses.append(any(map(proposer_computes, each.plans[before:])))
    assert [n for n, is_used in enumerate(uses) if is_used] == [0, RETRY_EVERY]


def test_a_full_step_requests_no_drafts_of_the_model() -> None:
    each = bench(0.5, max_slots=60, num_blocks=1025, draft_width=16)
    for n in range(60):
        each.add([n, 3], max_tokens=4, ignore_eos=True)
    each.run()
    crowded = [num_requested(plan) for plan in each.plans if len(plan.row_slots) > 50]
    assert sum(crowded) == 0


# ---- blocks
def test_a_block_is_published_when_both_models_have_computed_it() -> None:
    """The echo worker fails if the draft model starts after a position that it never computed."""
    each = bench(0.0, max_len=512, num_blocks=129)
    number = each.add(PROMPT, max_tokens=100, ignore_eos=True)
    each.run()
    again = [*PROMPT, *each.tokens(number), 1]
    other = each.add(again, max_tokens=30, ignore_eos=True)
    each.run()
    usage = each.usage(other)
    assert len(again) - MAX_DRAFT_LAG - 8 < usage.cached_tokens < len(again)
    assert each.tokens(other) == answer(again, 30, ignore_eos=True)


def test_the_draft_model_computes_cached_blocks_that_lack_its_kv() -> None:
    """The echo worker fails if the draft model starts after a position that it never computed."""
    each = bench(0.0, max_len=128)
    prompt = [*range(40)]
    for n in range(RETRY_EVERY - 1):
        each.add([n], max_tokens=8, ignore_eos=True)
        each.run()
        if n == 0:
            each.add(prompt, max_tokens=8, ignore_eos=True)  # the draft model does not compute it
            each.run()
            assert not any(map(proposer_computes, each.plans[-8:]))
            each.engine.check()
    found = []
    for _ in range(2):
        before = len(each.plans)
        number = each.add(prompt, max_tokens=8, ignore_eos=True)
        each.run()
        usage = each.usage(number)
        starts = [plan.follow_starts for plan in each.plans[before:] if plan.follow_starts]
        found.append((usage.cached_tokens, starts[0].tolist() if starts else []))
    assert found == [(36, [0]), (36, [])]


def test_the_draft_model_computes_a_prompt_without_an_answer() -> None:
    each = bench()
    prompt = list(range(1, 14))
    each.add(prompt, max_tokens=0)
    each.run()
    number = each.add(prompt, max_tokens=20, ignore_eos=True)
    each.run()
    usage = each.usage(number)
    assert usage.cached_tokens == 12


def test_a_draft_of_the_draft_model_preempts_no_request() -> None:
    for speculation in ("none", "model"):
        each = bench(num_blocks=23, block_tokens=4, max_slots=2, speculation=speculation)
        numbers = [each.add(PROMPT, max_tokens=40, seed=n, ignore_eos=True) for n in range(2)]
        each.run()
        assert each.engine.stats().num_preemptions == 0
        for seed, number in enumerate(numbers):
            assert each.tokens(number) == answer(PROMPT, 40, seed, ignore_eos=True)


# ---- refusals
@pytest.mark.parametrize("proposed", [None, [1], [1, 2, 3, 4, 5]])
def test_a_result_with_missing_or_extra_proposals_is_refused(proposed) -> None:
    each = bench()
    each.add(PROMPT, max_tokens=40)
    plan = each.plan()
    assert isinstance(plan, StepPlan)
    assert num_requested(plan) not in (0, 1, 5)
    result = each.worker.execute(plan)
    wrong = None if proposed is None else Int32.of(proposed)
    with pytest.raises(RuntimeError, match="requested"):
        each.engine.commit(replace(result, proposed=wrong), 0.1)


@pytest.mark.parametrize(
    ("speculation", "draft_model"), [("model", ""), ("none", "x"), ("ngram", "x")]
)
def test_a_draft_model_without_its_speculation_is_refused_and_vice_versa(
    speculation, draft_model
) -> None:
    with pytest.raises(ValueError, match="draft_model must be set together"):
        EngineConfig(
            worker=WorkerConfig(model="", draft_model=draft_model), speculation=speculation
        )


def test_drafts_of_a_step_are_the_proposals_of_the_step_before() -> None:
    each = bench(0.8, max_drafts=3)
    each.add(PROMPT, max_tokens=40, ignore_eos=True)
    proposed_tokens: list[int] = []
    for _ in range(12):
        plan = each.plan()
        assert isinstance(plan, StepPlan)
        (drafts,) = drafts_of(plan)
        assert drafts == proposed_tokens[: len(drafts)]
        result = each.worker.execute(plan, each.masks)
        proposed_tokens = [] if result.proposed is None else result.proposed.tolist()
        each.commit(result)
    assert len(each.tokens(1)) > 12
