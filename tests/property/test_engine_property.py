"""Ten thousand random operations: whatever clients do, every law holds and every answer is right.
(tests/support/storm.py)"""

from __future__ import annotations

import pytest

from tests.support.storm import SPECULATING, RequestStorm

OPERATIONS = 10_000
SEEDS = (0, 3, 4, 5, 100, 103, 104, 107, 200, 202, 205, 207)


@pytest.mark.parametrize("seed", SEEDS)
def test_ten_thousand_random_operations_keep_every_law(seed: int) -> None:
    storm = RequestStorm(seed)
    for _ in range(OPERATIONS):
        storm.operate()
    storm.settle()
    storm.check()
    stats = storm.bench.engine.stats()
    assert stats.num_preemptions > 0, "the storm was too mild to mean anything"
    assert storm.alone > 20, "too few constrained answers came to their end"
    if seed >= SPECULATING:
        assert 100 < stats.num_accepted_tokens < stats.num_draft_tokens
