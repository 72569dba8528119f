"""Tiers that forget at random, tell it late and fail at random: no answer changes, no block leaks.

The storm of test_engine_property.py around an engine whose cache is far too small, so that much of
what is asked for again has to come from the tiers.
"""

from __future__ import annotations

import pytest

from tests.support.storm import Forgetful

OPERATIONS = 10_000
SEEDS = {3: ["disk"], 7: ["host", "disk"], 107: ["host"], 205: ["host", "disk"], 207: ["disk"]}
"""seed (of Storm) -> the worker's tiers"""


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_tiers_do_every_law_holds_and_every_answer_is_right(seed: int) -> None:
    storm = Forgetful(seed, SEEDS[seed])
    for _ in range(OPERATIONS):
        storm.operate()
    storm.settle()
    storm.check()
    stats = storm.bench.engine.stats()
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    assert stats.num_fetched_tokens > 1000
    assert set(stats.num_fetches_failed) == {"cancelled", "damaged", "lost", "timeout"}
    assert storm.bench.tiers.used, "what was used is told"
