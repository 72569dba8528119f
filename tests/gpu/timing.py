"""Times work on the device."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from tests.gpu.session import GpuSession

WARM_UPS = 3
INNER = 10
"""Calls between two readings of the clock, so that launching does not count."""


def best_s(session: GpuSession, work: Callable[[], object], *, repeats: int = 5) -> float:
    """Return the seconds of one call of `work`: the least of `repeats` means over INNER calls. A
    rehearsal calls it once."""
    warm_ups, rounds, calls = session.choose((WARM_UPS, repeats, INNER), (0, 1, 1))
    for _ in range(warm_ups):
        work()
    times = []
    for _ in range(rounds):
        session.synchronize()
        started = perf_counter()
        for _ in range(calls):
            work()
        session.synchronize()
        times.append((perf_counter() - started) / calls)
    return min(times)
