"""When a process is said to grow: each time a little, and not once for good."""

from __future__ import annotations

import random

import pytest

from tests.benchmarks.memory_slope import FLAT, trend_of

REQUESTS = range(50_000, 100_000, 1_000)


@pytest.mark.parametrize("slope", [0.0, 10.0, -3.0, 1000.0])
def test_the_slope_of_a_line_is_its_own_whatever_the_noise(slope: float) -> None:
    dice = random.Random(5)
    trend = trend_of([(x, 9_000 + slope * x / 1000 + dice.gauss(0, 20)) for x in REQUESTS])
    assert trend.slope == pytest.approx(slope, abs=4 * trend.error)
    assert trend.error < 2.0
    assert trend.is_flat == (slope <= FLAT)


def test_one_step_for_good_is_not_growth() -> None:
    for place in REQUESTS:
        assert trend_of([(x, 9_000.0 + 2_000 * (x > place)) for x in REQUESTS]).is_flat


def test_stairs_are_growth() -> None:
    stairs = [(x, 9_000.0 + 1_024 * (x // 12_000)) for x in REQUESTS]
    assert not trend_of(stairs).is_flat
