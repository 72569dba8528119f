"""Drafts: their number, the effects of right and wrong drafts, and that no answer changes."""

from __future__ import annotations

import pytest

from engine_core.requests.drafting import RequestDrafting
from engine_core.speculation.draft_policy import Speculation
from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.wire.arrays import Int32
from protocol.worker.steps import StepPlan, StepResult
from tests.support.engines import EOS, Bench, answer, drafts_of

LOOP = [1, 2, 3] * 4


def looping(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
    """Return the next token of a model that repeats 1, 2, 3 forever."""
    return tokens[-1] % 3 + 1


def stubborn(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
    """Return the next token of a model that defeats n-gram drafts: a new token follows each 5."""
    return 5 if tokens[-1] != 5 else 6 + len(tokens) % 90


def bench(**options: object) -> Bench:
    return Bench(**{"speculation": "ngram", "sample": looping, **options})  # type: ignore[arg-type]


def drafted(plans: list[StepPlan]) -> list[int]:
    return [sum(map(len, drafts_of(plan))) for plan in plans]


# ---- the number of drafts
def drafting_after(*steps: tuple[int, int]) -> RequestDrafting:
    drafting = RequestDrafting(drafter=None)  # type: ignore[arg-type]
    for proposed, accepted in steps:
        drafting.observe(proposed, accepted, token=7)
    return drafting


def worth(drafting: RequestDrafting, rows: int = 1) -> int:
    config = EngineConfig(worker=WorkerConfig(model=""), draft_width=32, max_drafts=8)
    return Speculation(config).best_count(drafting.tally.acceptance, rows)


def test_right_drafts_lead_to_more_drafts_and_wrong_ones_to_none() -> None:
    assert 1 <= worth(drafting_after()) < 8
    assert worth(drafting_after(*[(4, 4)] * 9)) == 8
    assert worth(drafting_after(*[(4, 0)] * 9)) == 0


def test_drafts_are_tried_again_after_many_steps_without_drafts() -> None:
    failed = [(1, 0)] * 50
    idle = next(n for n in range(1000) if worth(drafting_after(*failed, *[(0, 0)] * n)))
    assert 20 < idle < 200


def test_steps_with_more_rows_have_fewer_drafts_per_row() -> None:
    drafting = drafting_after((4, 3), (4, 3))
    counts = [worth(drafting, rows) for rows in (1, 8, 32, 256)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


# ---- in the engine
def test_a_repetitive_answer_takes_fewer_steps_and_is_the_same() -> None:
    plain, fast = bench(speculation="none"), bench()
    for each in (plain, fast):
        number = each.add(LOOP, max_tokens=40)
        each.run()
        assert each.tokens(number) == answer(LOOP, 40, sample=looping)
        assert each.last_output(number).finish == "length"
    assert len(plain.plans) == 40
    assert len(fast.plans) < 15


def test_usage_and_statistics_count_drafts_and_accepted_drafts() -> None:
    fast = bench()
    number = fast.add(LOOP, max_tokens=40)
    fast.run()
    usage, stats = fast.last_output(number).usage, fast.engine.stats()
    assert usage.generated_tokens == stats.num_generated_tokens == 40
    assert usage.draft_tokens == usage.accepted_tokens == sum(drafted(fast.plans)) > 25
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (usage.draft_tokens,) * 2
    assert len(fast.plans) + usage.accepted_tokens == 40


def test_wrong_drafts_are_counted_and_change_nothing() -> None:
    prompt = [6, 5, 7, 5]
    slow = bench(sample=stubborn, ngram_min=1)
    number = slow.add(prompt, max_tokens=60)
    slow.run()
    usage = slow.last_output(number).usage
    assert slow.tokens(number) == answer(prompt, 60, sample=stubborn)
    assert usage.draft_tokens > usage.accepted_tokens == 0


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_an_answer_ends_at_its_stop_token_although_drafts_continue(stop: int) -> None:
    """The stop token comes after many repetitions, so the drafts continue the repetition."""

    def say(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
        is_late = len(tokens) >= 30
        return 50 + stop if is_late and tokens[-1] == stop else looping(tokens)

    for speculation in ("none", "ngram"):
        each = bench(sample=say, speculation=speculation)
        number = each.add(LOOP, max_tokens=100, stop_token_ids=[50 + stop])
        free = each.add([7] * 9, max_tokens=30)
        each.run()
        tokens, end = each.tokens(number), each.last_output(number)
        assert tokens[-1] == 50 + stop
        assert 50 + stop not in tokens[:-1]
        assert (end.finish, end.stop_token) == ("stop", 50 + stop)
        assert end.usage.generated_tokens == len(tokens)
        assert each.tokens(free) == answer([7] * 9, 30, sample=say)


def test_a_stop_token_within_right_drafts_ends_the_answer_there() -> None:
    """The drafts are copied from the prompt. They contain the stop token and later tokens."""
    prompt = [1, 2, 3, EOS, 8, 9, 8, 9, 8, 9, 1, 2]
    script = {2: 3, 3: EOS, EOS: 8, 8: 9, 9: 8}

    def say(tokens: list[int], seed: int = 0, possible: list[int] | None = None) -> int:
        return script[tokens[-1]]

    each = bench(sample=say, ngram_min=2)
    number = each.add(prompt, max_tokens=20)
    each.step()  # the prompt, and 3
    each.step()
    assert each.tokens(number) == [3, EOS]
    end = each.last_output(number)
    assert (end.finish, end.stop_token, end.tokens) == ("stop", EOS, [EOS])
    assert drafts_of(each.plans[1])[0][:2] == [EOS, 8]
    assert end.usage.accepted_tokens == 1 < end.usage.draft_tokens
    assert each.engine.is_idle


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_no_position_after_the_end_is_computed(max_tokens: int) -> None:
    each = bench()
    number = each.add(LOOP, max_tokens=max_tokens)
    each.run()
    assert len(each.tokens(number)) == max_tokens
    last = [
        start + count
        for plan in each.plans
        for start, count in zip(plan.row_starts.tolist(), plan.row_tokens.tolist(), strict=True)
    ]
    assert max(last) == len(LOOP) + max_tokens - 1, "the last token is never computed"


def test_prompts_go_before_drafts() -> None:
    """Drafts get only the part of the token budget that prompts leave."""
    each = bench(token_budget=8)
    fast = each.add(LOOP, max_tokens=60)
    while not any(drafted(each.plans)):
        each.step()
    slow = each.add([50 + i for i in range(30)], max_tokens=2)
    before = len(each.plans)
    while not each.tokens(slow):
        each.step()
    during = each.plans[before:]
    assert [plan.row_tokens.tolist() for plan in during[:4]] == [[1, 7]] * 4
    assert not any(drafted(during[:4]))
    each.run()
    assert each.tokens(fast) == answer(LOOP, 60, sample=looping)


def test_a_draft_preempts_no_request() -> None:
    """The blocks are just enough for two answers, so blocks for drafts would be too many."""
    for speculation in ("none", "ngram"):
        each = bench(num_blocks=27, block_tokens=4, max_slots=2, speculation=speculation)
        numbers = [each.add(LOOP, max_tokens=40, seed=n) for n in range(2)]
        each.run()
        assert each.engine.stats().num_preemptions == 0
        for number in numbers:
            assert each.tokens(number) == answer(LOOP, 40, sample=looping)


def test_blocks_with_wrong_drafts_are_never_found() -> None:
    """A prompt that continues the answer finds all its full blocks, with the right content."""
    each = bench(sample=stubborn, ngram_min=1, block_tokens=2, num_blocks=65)
    number = each.add([6, 5, 7, 5], max_tokens=30)
    each.run()
    assert sum(drafted(each.plans)) > 0
    again = [6, 5, 7, 5, *each.tokens(number)]
    other = each.add([*again, 1], max_tokens=3)
    each.run()
    assert each.tokens(other) == answer([*again, 1], 3, sample=stubborn)
    usage = each.usage(other)
    assert usage.cached_tokens == len(again) - 2, "the last token was never computed"
    assert each.engine.stats().free_blocks == 64


def test_a_row_that_fails_after_accepted_drafts_keeps_their_tokens() -> None:
    each = bench()
    number = each.add(LOOP, max_tokens=40)
    while not any(drafted(each.plans)):
        each.plan()
        if any(drafted(each.plans)):
            break
        each.finish()
    drafts = drafts_of(each.plans[-1])[0]
    sampled = [*drafts[:2], 0]
    before = each.tokens(number)
    each.commit(
        StepResult(
            step=each.plans[-1].step,
            tokens=Int32.of(sampled),
            counts=Int32.of([3]),
            failed=Int32.of([0]),
        )
    )
    assert each.last_output(number).finish == "error"
    assert each.tokens(number) == before + drafts[:2]
    assert each.engine.is_idle


@pytest.mark.parametrize(
    ("tokens", "counts"), [([1], None), ([1, 2], [1]), ([1] * 12, [12]), ([], [0])]
)
def test_a_result_that_does_not_fit_the_drafts_is_refused(
    tokens: list[int], counts: list[int] | None
) -> None:
    each = bench()
    each.add(LOOP, max_tokens=40)
    each.step()
    plan = each.plan()
    assert plan.row_drafts is not None
    result = StepResult(
        step=plan.step,
        tokens=Int32.of(tokens),
        counts=None if counts is None else Int32.of(counts),
        failed=Int32.of([]),
    )
    if tokens == [1]:
        each.engine.commit(result, 0.1)  # without counts, each row has one token
        return
    with pytest.raises(RuntimeError):
        each.engine.commit(result, 0.1)


# ---- planning ahead
def test_no_step_is_planned_ahead_of_a_step_with_drafts() -> None:
    each = bench(steps_in_flight=2)
    number = each.add(LOOP, max_tokens=40)
    for _ in range(4):
        assert each.plan() is not None
        assert each.plan() is None, "the next drafts depend on the step in flight"
        each.finish()
    assert len(each.tokens(number)) > 8
    strange = bench(steps_in_flight=2)
    strange.add([5, 6, 7, 8], max_tokens=40)
    assert strange.plan() is not None
    assert strange.plan() is not None


def test_a_request_with_rejected_drafts_does_not_stop_planning_ahead() -> None:
    """After a few wrong drafts, the next step is planned without waiting for this request."""
    each = bench(steps_in_flight=2, sample=stubborn, ngram_min=1)
    number = each.add([6, 5, 7, 5], max_tokens=80)
    waits = 0
    while not each.engine.is_idle:
        while each.plan() is not None:
            pass
        waits += len(each.in_flight) == 1
        each.finish()
    assert each.last_output(number).finish == "length"
    assert 0 < waits < 15
