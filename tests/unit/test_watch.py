"""Frames of an engine: rates, percentiles and steps, made from its statuses."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.engine.messages import EngineStatus, Limits
from protocol.engine.stats import BlockCounts, EngineStats, StepSummary
from protocol.engine.usage import RequestStatus
from protocol.shared.latency import NUM_BUCKETS, bucket
from protocol.shared.watch import (
    MAX_PAST,
    WINDOW_S,
    EngineWatcher,
    Rates,
    merged_steps,
    past_points,
    rates,
)

LIMITS = Limits(
    max_len=512, max_slots=8, block_tokens=16, num_blocks=101, token_budget=64, prefix_cache=True
)


def a_status(now_s: float = 10.0, **more: Any) -> EngineStatus:
    fields = {name: more.pop(name) for name in list(more) if name in EngineStats.__struct_fields__}
    return EngineStatus(request=1, now_s=now_s, stats=EngineStats(**fields), **more)


def counts(**numbers: int) -> list[int]:
    """Return a histogram with these numbers of latencies, named by milliseconds: ms50=3."""
    found = [0] * NUM_BUCKETS
    for name, number in numbers.items():
        found[bucket(int(name.removeprefix("ms")) / 1000)] = number
    return found


def a_step(first: int, count: int = 1, ended_s: float = 10.0) -> StepSummary:
    return StepSummary(first, count, 1, 2 * count, 3, 0.5, 0.25, ended_s)


def test_rates_are_differences_by_the_engines_own_clock() -> None:
    before = a_status(
        10.0, num_generated_tokens=100, num_prompt_tokens=10, num_finished={"stop": 1}
    )
    now = a_status(
        12.0,
        num_generated_tokens=150,
        num_prompt_tokens=50,
        num_cached_tokens=30,
        num_steps=20,
        num_finished={"stop": 2, "length": 3},
        busy_s=1.0,
    )
    assert rates(before, now) == Rates(
        tokens_per_s=25.0, steps_per_s=10.0, requests_per_s=2.0, cache_hits=0.75, busy=0.5
    )
    assert rates(now, now) == rates(now, before) == Rates()


def test_tokens_that_are_computed_again_are_a_share_of_the_new_prompt_tokens() -> None:
    before = a_status(10.0, num_prompt_tokens=100, num_uncovered_tokens=20, total_checkpoints=4)
    now = a_status(11.0, num_prompt_tokens=150, num_uncovered_tokens=30, total_checkpoints=4)
    assert rates(before, now).recomputed == 0.2
    assert rates(now, a_status(12.0, num_prompt_tokens=150, total_checkpoints=4)).recomputed is None
    assert rates(a_status(10.0), a_status(11.0, num_prompt_tokens=5)).recomputed is None


def test_a_frame_has_the_state_and_the_rates_since_the_one_before() -> None:
    watcher = EngineWatcher("tiny", "replica", 2)
    first = watcher.push(a_status(10.0, num_generated_tokens=5), LIMITS)
    assert (first.model, first.role, first.engine, first.rates) == ("tiny", "replica", 2, Rates())
    row = RequestStatus(name="x", waits_for="slot")
    blocks = BlockCounts(requests=1, free=2)
    status = a_status(
        12.0, num_generated_tokens=25, rows=[row], num_open=7, blocks=blocks, running=3
    )
    frame = watcher.push(status, LIMITS)
    assert frame.rates.tokens_per_s == 10.0
    assert (frame.requests, frame.num_open, frame.blocks) == ([row], 7, blocks)
    assert (frame.stats.running, frame.limits, frame.now_s) == (3, LIMITS, 12.0)


def test_percentiles_are_those_of_the_last_minute() -> None:
    watcher = EngineWatcher()
    assert watcher.push(a_status(0.0, gaps=counts(ms50=100)), LIMITS).gap is None
    gap = watcher.push(a_status(1.0, gaps=counts(ms50=100, ms500=10)), LIMITS).gap
    assert gap is not None
    assert gap.count == 10
    assert 0.4 < gap.p50 < 0.6
    later = a_status(WINDOW_S + 1.0, gaps=counts(ms50=290, ms500=10))
    gap = watcher.push(later, LIMITS).gap
    assert gap is not None
    assert gap.count == 190
    assert 0.04 < gap.p50 <= gap.p99 < 0.06
    assert watcher.push(a_status(3 * WINDOW_S, gaps=later.gaps), LIMITS).gap is None


def test_percentiles_of_first_tokens_and_gaps_are_apart() -> None:
    watcher = EngineWatcher()
    watcher.push(a_status(0.0), LIMITS)
    frame = watcher.push(a_status(1.0, first_tokens=counts(ms900=100), gaps=counts(ms20=1)), LIMITS)
    assert frame.first_token is not None
    assert frame.gap is not None
    assert frame.first_token.p50 > 0.5 > 0.1 > frame.gap.p50


def test_the_next_status_is_asked_for_the_steps_after_the_last() -> None:
    watcher = EngineWatcher()
    assert watcher.after_step == 0
    old, new = a_step(3, 2, ended_s=50.0), a_step(5, 4, ended_s=99.0)
    assert watcher.push(a_status(100.0, steps=[old, new]), LIMITS).steps == [new], "only the last"
    assert watcher.after_step == 8
    assert watcher.push(a_status(101.0, steps=[]), LIMITS).steps == []
    assert watcher.after_step == 8
    later = a_step(9, 1, ended_s=102.0)
    assert watcher.push(a_status(102.0, num_steps=9, steps=[later]), LIMITS).steps == [later]


def test_a_restarted_engine_starts_anew() -> None:
    watcher = EngineWatcher()
    watcher.push(a_status(10.0, num_steps=9, steps=[a_step(9)], gaps=counts(ms20=5)), LIMITS)
    frame = watcher.push(a_status(1.0, num_steps=2, gaps=counts(ms20=2)), LIMITS)
    assert (frame.rates, frame.gap, watcher.after_step) == (Rates(), None, 0)


def test_an_engine_without_an_answer_keeps_its_last_state() -> None:
    watcher = EngineWatcher("tiny")
    assert watcher.fail("it is loading").model == "tiny"
    watcher.push(a_status(10.0), LIMITS)
    status = a_status(11.0, running=3, num_generated_tokens=9, steps=[a_step(1)])
    watcher.push(status, LIMITS)
    frame = watcher.fail("it is lost")
    assert (frame.error, frame.stats.running, frame.rates, frame.steps) == (
        "it is lost",
        3,
        Rates(),
        [],
    )
    assert watcher.push(a_status(12.0), LIMITS).error == ""


@pytest.mark.parametrize("number", [1, 7, 120, 121, 1000])
def test_very_many_steps_are_merged_and_lose_no_token(number: int) -> None:
    steps = [a_step(2 * i + 1, 2, ended_s=i) for i in range(number)]
    fewer = merged_steps(steps, 120)
    assert min(number, 60) <= len(fewer) <= 120
    for name in ("count", "prefill", "decode", "draft", "busy_s"):
        assert sum(getattr(s, name) for s in fewer) == sum(getattr(s, name) for s in steps)
    assert (fewer[0].first, fewer[-1].ended_s) == (1, number - 1)


def a_run(first: int, ended_s: float, *, decode: int, busy_s: float = 0.05) -> StepSummary:
    return StepSummary(first, 1, 0, decode, 0, busy_s, busy_s, ended_s)


def test_the_curves_before_the_first_report_come_from_the_steps() -> None:
    steps = [a_run(1, 60.5, decode=30), a_run(2, 98.2, decode=4), a_run(3, 98.9, decode=5)]
    points = past_points(steps, 100.0)
    assert len(points) == MAX_PAST
    assert [point.at_s for point in points] == [100.0 - age for age in range(MAX_PAST)][::-1]
    by_age = points[::-1]
    assert [by_age[age].tokens_per_s for age in (0, 1, 2, 39, 40)] == [0, 9, 0, 30, 0]
    assert [by_age[age].gap is None for age in (0, 39, 40)] == [False, False, True]
    assert by_age[0].gap == pytest.approx(0.05, rel=0.2)


def test_steps_that_share_an_entry_count_in_the_seconds_in_which_they_were() -> None:
    run = StepSummary(1, 10, 0, 40, 0, 0.8, 0.1, 98.2)
    by_age = past_points([run], 100.0)[::-1]
    assert [round(by_age[age].tokens_per_s) for age in (0, 1, 2, 3)] == [0, 10, 30, 0]


def test_a_gap_leaves_the_curve_after_a_minute() -> None:
    points = past_points([a_run(1, 20.5, decode=1)], 100.0)
    assert [point.gap is not None for point in points].count(True) == WINDOW_S


def test_nothing_is_claimed_of_the_time_before_the_oldest_recorded_step() -> None:
    points = past_points([a_run(700, 97.5, decode=4), a_run(701, 99.5, decode=4)], 100.0)
    assert [point.tokens_per_s for point in points] == [4, 0, 4]
    assert past_points([a_run(700, 5.0, decode=4)], 100.0)[0].tokens_per_s == 0


def test_a_new_client_gets_the_curves_and_the_last_steps() -> None:
    watcher = EngineWatcher()
    watcher.push(a_status(100.0, steps=[a_step(1, ended_s=98.5)], num_steps=1), LIMITS)
    for second in range(1, 200):
        status = a_status(100.0 + second, steps=[a_step(1 + second)], num_steps=1 + second)
        assert watcher.push(status, LIMITS).past == []
    first = watcher.first_frame()
    assert [point.at_s for point in first.past] == [
        100.0 + second for second in range(200 - MAX_PAST, 200)
    ]
    assert [step.first for step in first.steps] == list(range(81, 201))
    assert watcher.repeat().past == []


def test_a_restarted_engine_keeps_the_curves_but_not_the_steps() -> None:
    watcher = EngineWatcher()
    watcher.push(a_status(100.0, num_steps=9, steps=[a_step(9, ended_s=99.9)]), LIMITS)
    watcher.push(a_status(101.0, num_steps=9), LIMITS)
    watcher.push(a_status(1.0, num_steps=2), LIMITS)
    first = watcher.first_frame()
    assert first.steps == []
    assert first.past[-1].at_s == 101.0
