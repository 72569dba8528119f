"""Tiers that forget at random, tell it late and fail at random: no answer changes, no block leaks.

The storm of test_engine_property.py around an engine whose cache is far too small, so that much of
what is asked for again has to come from the tiers.
"""

from __future__ import annotations

import pytest

from tests.support.engines import VOCAB
from tests.support.storm import Storm

OPERATIONS = 10_000
SEEDS = {3: ["disk"], 7: ["host", "disk"], 107: ["host"], 205: ["host", "disk"], 207: ["disk"]}
"""seed (of Storm) -> the worker's tiers"""
FAULTS = ["", "", "", "damaged", "timeout"]


class Forgetful(Storm):
    def __init__(self, seed: int) -> None:
        super().__init__(
            seed, tiers=SEEDS[seed], block_tokens=4, num_blocks=25, kv_load_tokens=5, max_slots=4
        )

        self.openings = [[self.random.randrange(VOCAB) for _ in range(44)] for _ in range(12)]

    def operate(self) -> None:
        choice = self.random.random()
        if choice < 0.15:
            self.tend()
        elif choice < 0.4:
            self.bench.step()
        else:
            super().operate()

    def prompt(self) -> list[int]:
        """They begin in one of a few ways, more than the cache has room for."""
        opening = self.random.choice(self.openings)
        fresh = super().prompt()[:8]
        return opening[: self.random.randrange(len(opening))] + fresh

    def tend(self) -> None:
        """The tiers tell what they hold, lose some of it, or are done with a fetch."""
        tiers, choice = self.bench.tiers, self.random.random()
        if choice < 0.3:
            self.bench.hear(tiers.news())
        elif choice < 0.4:
            kept = [(tier, content) for tier in tiers.kept for content in tiers.kept[tier]]
            for tier, content in self.random.sample(kept, len(kept) // 20):
                tiers.lose(tier, content)
        elif tiers.jobs:
            job = self.random.choice(list(tiers.jobs))
            self.bench.hear(tiers.do(job, self.random.choice(FAULTS)))

    def settle(self) -> None:
        super().settle()
        while self.bench.tiers.jobs:
            self.bench.hear(self.bench.tiers.do(next(iter(self.bench.tiers.jobs))))
            self.bench.run()


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_tiers_do_every_law_holds_and_every_answer_is_right(seed: int) -> None:
    storm = Forgetful(seed)
    for _ in range(OPERATIONS):
        storm.operate()
    storm.settle()
    storm.check()
    stats = storm.bench.engine.stats()
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    assert stats.num_fetched_tokens > 1000
    assert set(stats.num_fetches_failed) == {"cancelled", "damaged", "lost", "timeout"}
    assert storm.bench.tiers.used, "what was used is told"
