"""How long the device waits between steps."""

from __future__ import annotations

import pytest

from worker.debug.device_idle import LATEST, DeviceIdle


def test_a_gap_is_from_the_end_of_a_step_to_the_start_of_the_next():
    pace = DeviceIdle()
    for started, ended in ((1.0, 2.0), (2.5, 3.0), (3.125, 4.0)):
        pace.record(started, ended)
    assert pace.percentile_s(0) == 0.125
    assert pace.percentile_s(100) == 0.5
    assert pace.summary().startswith("3 steps, gaps between them: p10 125.000 ms")


def test_a_step_that_was_launched_before_the_one_before_had_ended_did_not_wait():
    pace = DeviceIdle()
    pace.record(1.0, 3.0)
    pace.record(2.0, 4.0)
    assert pace.percentile_s(100) == 0


@pytest.mark.parametrize("num_steps", [0, 1])
def test_without_two_steps_there_is_no_gap(num_steps):
    pace = DeviceIdle()
    for _ in range(num_steps):
        pace.record(1.0, 2.0)
    assert pace.percentile_s(50) == 0
    assert pace.num_steps == num_steps


def test_only_the_latest_gaps_are_kept():
    pace = DeviceIdle()
    pace.record(0.0, 0.0)
    pace.record(9.0, 10.0)
    for _ in range(LATEST):
        pace.record(11.0, 10.0)
    assert pace.percentile_s(100) == 1.0
