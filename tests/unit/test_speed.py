"""How fast a replica computes, of late."""

from __future__ import annotations

import pytest

from engine_core.policy.throughput import LONG_S, Rate, Throughput


def test_a_rate_looks_back_about_ten_seconds() -> None:
    rate = Rate()
    for per_s in (100, 1000):
        for _ in range(300):
            rate.observe(per_s // 10, 0.1)
    assert rate.per_s == pytest.approx(1000, rel=0.06)
    rate.observe(1, 0.0)
    assert rate.seconds == pytest.approx(60)


def test_what_a_step_of_prompts_takes_says_nothing_of_answers() -> None:
    speed = Throughput()
    assert not speed.is_long_step(1 << 20)  # nobody knows
    speed.observe(1, 0.02, has_prompts=False)
    assert not speed.is_long_step(1 << 20)
    speed.observe(256, 0.2, has_prompts=True)
    fits = int(256 / 0.2 * LONG_S)
    assert [speed.is_long_step(tokens) for tokens in (0, fits, fits + 1)] == [False, False, True]
    assert speed.busy_s == pytest.approx(0.22)
