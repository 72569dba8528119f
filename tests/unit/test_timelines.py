"""The computation of timelines: it agrees with its slow twin, and can be spread over time."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from itertools import combinations
from typing import Any

import pytest

from engine_core.history import history as history_module
from engine_core.history import queue, timeline
from engine_core.history import requests as histories
from engine_core.history import steps as step_log
from engine_core.history.history import TimelineWork
from engine_core.history.queue import TimelineQueue
from engine_core.history.requests import RequestHistory
from engine_core.history.steps import StepRun, between
from engine_core.history.timeline import FindOwner, build_timeline
from protocol.engine.messages import Account, GetTimeline, Refused
from protocol.engine.timeline import MAX_SHARES, EngineTimeline, StepGroup
from protocol.engine.usage import Usage
from tests.support.engines import repetitive_token
from tests.support.timelines import TimedBench, finish, slow_groups

TOTALS = ("own_prefill", "own_decodes", "own_drafts", "other_decodes", "other_prefill", "steps")
US, THEM = b"us", b"them"


@pytest.fixture(autouse=True)
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_GROUPS", 10)
    monkeypatch.setattr(step_log, "MAX_RUN_S", 0.3)


def rounded(groups: list[StepGroup]) -> list[object]:
    """Return the fields of groups; sums of floats depend on the order of the terms."""
    return [
        [round(value, 9) if isinstance(value, float) else value for value in vars_of(group)]
        for group in groups
    ]


def vars_of(group: StepGroup) -> list[object]:
    return [getattr(group, name) for name in group.__struct_fields__]


def busy_bench(source: random.Random, steps: int, **options: object) -> TimedBench:
    """Return a bench in which requests of several accounts come and go. All are named "all"."""
    bench = TimedBench(
        **{
            "prefix_cache": False,
            "max_slots": 4,
            "num_blocks": 40,
            "token_budget": 24,
            **options,
        }  # type: ignore[arg-type]
    )
    bench.tick(bench.now)
    for step in range(steps):
        if bench.engine.num_open < 7:
            bench.add(
                [source.randrange(1, 5) for _ in range(source.randint(1, 40))],
                labels=[f"request {step % 9}", "all"],
                account=Account(name=source.choice(["alice", "bob"])),
                max_tokens=source.randint(1, 40),
                ignore_eos=True,
            )
        if step % 7 == 0:
            bench.encode([2] * source.randint(1, 9), labels=["encoding", "all"])
        bench.timed_step(source.choice([0.05, 0.1]))
    return bench


@pytest.mark.parametrize("seed", range(6))
def test_a_timeline_agrees_with_groups_that_are_merged_afterwards(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    def build_and_compare(
        history: RequestHistory,
        usage: Usage,
        runs: Sequence[StepRun],
        find_owner: FindOwner,
        **more: Any,
    ) -> Generator[None, None, EngineTimeline]:
        nonlocal compared
        found = yield from build_timeline(history, usage, runs, find_owner, **more)
        assert rounded(found.groups) == rounded(slow_groups(runs, history, find_owner, 10))
        compared += 1
        return found

    monkeypatch.setattr(history_module, "build_timeline", build_and_compare)
    monkeypatch.setattr(history_module, "MAX_TIMELINES", 1000)
    monkeypatch.setattr(histories, "MAX_OWNERS", 20)
    options = {"speculation": "ngram", "sample": repetitive_token} if seed % 2 else {}
    bench = busy_bench(random.Random(seed), 120, **options)
    bench.timelines("all")
    assert compared > 20


def test_the_steps_of_a_period_are_those_that_overlap_it() -> None:
    bench = busy_bench(random.Random(7), 60)
    runs = bench.engine.history.steps.snapshot()
    times = sorted({at for run in runs for at in (run.started_at, run.ended_at)})
    for start, end in combinations([times[0] - 1, *times[::5], times[-1] + 1], 2):
        overlapping = [run for run in runs if run.ended_at > start and run.started_at < end]
        assert between(runs, start, end) == overlapping


def test_many_groups_are_merged_and_lose_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TimedBench(prefix_cache=False, max_slots=2, token_budget=8)
    bench.tick(bench.now)
    bench.add([1] * 4, max_tokens=190, ignore_eos=True, labels=["long"])
    for number in range(90):
        bench.add([2] * 13, max_tokens=1, ignore_eos=True, labels=[f"other {number % 6}"])
        bench.timed_step(0.25)
        bench.timed_step(0.25 if number else 6.0)
    fewer = bench.timeline("long").groups
    assert len(fewer) == 10
    monkeypatch.setattr(timeline, "MAX_GROUPS", 1000)
    groups = bench.timeline("long").groups
    assert len(groups) > 150
    for name in TOTALS:
        assert sum(getattr(g, name) for g in fewer) == sum(getattr(g, name) for g in groups)
    assert (fewer[0].start_s, fewer[-1].end_s) == (groups[0].start_s, groups[-1].end_s)
    assert [group.longest_s for group in fewer] == [6.0] + [0.25] * 9
    assert {len(group.prompts) for group in fewer} == {MAX_SHARES}


def test_timelines_can_be_interrupted_after_each_entry_of_the_log() -> None:
    bench = busy_bench(random.Random(1), 100)
    num_entries = len(bench.engine.history.steps.snapshot())
    work = bench.engine.compute_timelines(["all"], str)
    found = bench.timelines("all")
    assert len(found) == 16
    assert sum(1 for _ in work) > num_entries


def test_timelines_show_their_start_even_if_the_engine_continues() -> None:
    bench = busy_bench(random.Random(2), 50)
    bench.add([3] * 9, labels=["open"], max_tokens=50, ignore_eos=True)
    for _ in range(30):
        bench.timed_step()
    names = ["open", "all"]
    work = bench.engine.compute_timelines(names, lambda client: client.decode())
    next(work)
    at_once = bench.timelines(*names)
    for _ in range(3):
        bench.timed_step()
        next(work)
    bench.run()
    assert finish(work) == at_once
    assert bench.timeline("open").finish == "length"


# ---- the queue


class Seconds:
    """A clock that advances by one second each time it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def work_of(num: int) -> TimelineWork:
    """Yield `num` times, and return no timelines."""
    for _ in range(num):
        yield
    return []


def test_the_queue_works_in_slices_and_answers_in_order() -> None:
    waiting, clock = TimelineQueue(), Seconds()
    assert not waiting.is_busy
    assert waiting.add(US, GetTimeline(request=1, names=["a"]), work_of(5)) is None
    assert waiting.add(THEM, GetTimeline(request=1, names=["b"]), work_of(0)) is None
    assert waiting.run(3.0, clock) == []
    assert waiting.is_busy
    assert clock.now == 4.0
    assert [(c, each.request) for c, each in waiting.run(4.0, clock)] == [(US, 1), (THEM, 1)]
    assert not waiting.is_busy
    assert waiting.run(3.0, clock) == []


def test_the_queue_forgets_a_client_that_is_gone() -> None:
    waiting = TimelineQueue()
    for number, client in enumerate([US, THEM, US]):
        waiting.add(client, GetTimeline(request=number, names=[]), work_of(2))
    waiting.remove(US)
    assert [(c, each.request) for c, each in waiting.run(100.0, Seconds())] == [(THEM, 1)]


def test_a_full_queue_refuses_and_names_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_WAITING", 2)
    waiting = TimelineQueue()
    replies = [
        waiting.add(US, GetTimeline(request=number, names=[]), work_of(1)) for number in range(3)
    ]
    assert replies[:2] == [None, None]
    assert isinstance(replies[2], Refused)
    assert (replies[2].request, replies[2].error.code) == (2, "overloaded")
    assert replies[2].error.retry_after_s == 1
