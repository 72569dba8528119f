"""Health of the worker: late steps and stopped workers are reported, large steps are not."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.workers.health import LATE_S, Health, step_limit_s
from gateway.api.server.health import describe_worker, engine_activity
from protocol.engine.messages import Limits
from protocol.engine.stats import EngineStats, WorkerStatus

STOPPED_S = 4.0
LIMITS = Limits(
    max_len=9000, max_slots=1, block_tokens=16, num_blocks=9, token_budget=256, prefix_cache=True
)


def computing(step_s: float, expected_s: float, **more: Any) -> WorkerStatus:
    return WorkerStatus(pid=7, step=8, step_s=step_s, expected_s=expected_s, **more)


@pytest.mark.parametrize(
    "view",
    [
        WorkerStatus(pid=7),
        computing(0.5, 0.01),
        computing(LATE_S - 0.1, 0.01),
        computing(60.0, 59.0),
        computing(120.0, 0.0),  # the first step: its expected time is unknown
    ],
)
def test_an_idle_or_slow_worker_is_healthy(view: WorkerStatus) -> None:
    health = Health(STOPPED_S)
    assert not health.update(view, False, 5.0)
    assert health.trouble == ""


def test_a_late_step_is_reported_until_it_completes() -> None:
    health = Health(STOPPED_S)
    assert health.update(computing(LATE_S, 0.5), False, 5.0)
    assert health.trouble == (
        "the worker (pid 7) has been computing step 8 for 10.0 s; 0.5 s were expected"
    )
    assert not health.update(computing(LATE_S + 1, 0.5), False, 6.0)
    assert not health.is_lost(1e9)
    assert health.update(WorkerStatus(pid=7), False, 7.0)
    assert health.trouble == ""


def test_a_stopped_worker_is_reported_at_once_and_later_lost() -> None:
    health = Health(STOPPED_S)
    assert health.update(WorkerStatus(pid=7), True, 5.0)
    assert health.trouble == "the worker (pid 7) has been stopped by a signal for 0.0 s"
    assert not health.update(WorkerStatus(pid=7), True, 6.5)
    assert "for 1.5 s" in health.trouble
    assert not health.is_lost(5.0 + STOPPED_S - 0.1)
    assert health.is_lost(5.0 + STOPPED_S)


def test_a_worker_that_continues_in_time_is_not_lost() -> None:
    health = Health(STOPPED_S)
    health.update(WorkerStatus(pid=7), True, 5.0)
    assert health.update(WorkerStatus(pid=7), False, 6.0)
    assert not health.update(WorkerStatus(pid=7), False, 7.0)
    assert not health.is_lost(5.0 + STOPPED_S)


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (WorkerStatus(pid=7), "idle"),
        (computing(0.5, 0.0), "computing step 8 for 0.5 s"),
        (
            computing(1.2, 1.5, prompt_tokens=3000, computed_tokens=512),
            "computing step 8 for 1.2 s (1.5 s expected): chunk 3 of 12",
        ),
        (WorkerStatus(pid=7, trouble="stopped"), "stopped"),
    ],
)
def test_the_workers_activity_is_described_in_words(view: WorkerStatus, words: str) -> None:
    assert describe_worker(view, 256) == words


def test_an_engine_without_a_heartbeat_is_not_reported() -> None:
    assert engine_activity(None, LIMITS) == engine_activity(EngineStats(), None) == {}
    activity = engine_activity(
        EngineStats(num_steps=9, worker=computing(0.5, 0.0, engine_pid=6)), LIMITS
    )
    assert (activity["pid"], activity["steps"]) == (6, 9)
    assert (activity["worker_pid"], activity["worker_step_s"]) == (7, 0.5)


def test_a_long_step_may_take_ten_times_its_expected_time() -> None:
    assert step_limit_s(300.0, 0.0) == 300.0
    assert step_limit_s(300.0, 29.0) == 300.0
    assert step_limit_s(300.0, 90.0) == 900.0
