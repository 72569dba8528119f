"""A short run of the fuzz targets: every POST route, and every ZeroMQ socket except those in
ELSEWHERE.

The full run is `python -m tests.torture.fuzz --frames 1000000 --bodies 100000`.
"""

from __future__ import annotations

import pytest

from tests.torture.fuzz.bodies import bodies
from tests.torture.fuzz.sockets import TARGETS

FRAMES, BODIES, SEED = 1_500, 400, 20
ELSEWHERE = {"engine-worker", "worker-engine"}
"""Targets that the tests of their process cover."""


@pytest.mark.parametrize("target", sorted(TARGETS.keys() - ELSEWHERE))
def test_a_process_refuses_and_counts_malformed_messages(target: str) -> None:
    outcome = TARGETS[target](FRAMES, SEED)
    assert outcome.sent >= FRAMES
    assert outcome.counted > 0


def test_mutilated_bodies_are_refused_or_answered_and_never_fail() -> None:
    outcome = bodies(BODIES, SEED)
    assert outcome.sent == BODIES
    assert outcome.malformed > BODIES // 4
