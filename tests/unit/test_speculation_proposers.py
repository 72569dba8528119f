"""What a draft model and a model's own head have in common in the engine's plans: when they draft,
and that no answer changes. What only one of them does is in test_speculation_model.py and
test_speculation_head.py.
"""

from __future__ import annotations

import pytest

from engine_core.speculation.draft_policy import RETRY_EVERY
from tests.support.engines import (
    Bench,
    answer,
    guess_with_accuracy,
    num_requested,
    proposer_computes,
)

PROMPT = [5, 6, 7, 8]
PROPOSERS = ("model", "mtp")


def bench(speculation: str, chance: float = 1.0, **options: object) -> Bench:
    options = {"speculation": speculation, "guess": guess_with_accuracy(chance), **options}
    return Bench(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("speculation", PROPOSERS)
@pytest.mark.parametrize("chance", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_answer_is_the_same_for_any_drafts(speculation: str, chance: float, depth: int) -> None:
    each = bench(speculation, chance, steps_in_flight=depth)
    number = each.add(PROMPT, max_tokens=60, ignore_eos=True)
    each.run()
    assert each.tokens(number) == answer(PROMPT, 60, ignore_eos=True)
    usage = each.usage(number)
    assert usage.accepted_tokens == 60 - len(each.plans)
    assert (usage.accepted_tokens == 0) == (chance == 0)


@pytest.mark.parametrize("speculation", PROPOSERS)
def test_drafts_that_are_always_right_give_nine_tokens_per_step(speculation: str) -> None:
    each = bench(speculation, max_drafts=8)
    number = each.add(PROMPT, max_tokens=91, ignore_eos=True)
    each.run()
    assert len(each.plans) < 15
    usage, stats = each.usage(number), each.engine.stats()
    assert usage.draft_tokens == usage.accepted_tokens > 75
    assert usage.draft_tokens == stats.num_draft_tokens == stats.num_accepted_tokens


@pytest.mark.parametrize("speculation", PROPOSERS)
def test_no_position_after_the_end_is_computed(speculation: str) -> None:
    for max_tokens in range(1, 14):
        each = bench(speculation, block_tokens=1, num_blocks=201)
        number = each.add(PROMPT, max_tokens=max_tokens, ignore_eos=True)
        each.run()
        assert len(each.tokens(number)) == max_tokens
        ends = [
            start + count
            for plan in each.plans
            for start, count in zip(plan.row_starts.tolist(), plan.row_tokens.tolist(), strict=True)
        ]
        assert max(ends) == len(PROMPT) + max_tokens - 1


@pytest.mark.parametrize("speculation", PROPOSERS)
def test_drafts_that_cost_as_much_as_they_save_are_not_requested(speculation: str) -> None:
    for cost, is_used in ((0.1, True), (0.95, False), (3.0, False)):
        each = bench(speculation, draft_cost=cost)
        each.add(PROMPT, max_tokens=40, ignore_eos=True)
        each.run()
        assert any(map(num_requested, each.plans)) == is_used
        assert any(map(proposer_computes, each.plans)) == is_used, "what is unused computes nothing"


@pytest.mark.parametrize("speculation", PROPOSERS)
def test_drafts_that_were_never_right_are_tried_by_few_requests(speculation: str) -> None:
    each = bench(speculation, 0.0)
    drafting, computing = [], []
    for n in range(2 * RETRY_EVERY):
        before = len(each.plans)
        each.add([*PROMPT, n], max_tokens=20, ignore_eos=True)
        each.run()
        drafting.append(any(map(num_requested, each.plans[before:])))
        computing.append(any(map(proposer_computes, each.plans[before:])))
    assert [n for n, is_used in enumerate(drafting) if is_used] == [0, RETRY_EVERY]
    assert computing == drafting
