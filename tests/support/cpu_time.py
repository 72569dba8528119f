"""Measures CPU time of pure code, to compare it with other CPU time of the same run.

A bound in seconds would depend on the machine. Other processes can only make a run slower, so the
shortest of a few runs is used.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

TRIES = 5
MOST_GROWTH = 1.5
"""Largest ratio of time growth to input growth. The ratio is 1 for linear time, under 1.2 for
n log n at the sizes used here, and 4 for quadratic time."""


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time of one call, in seconds, without collections of garbage. Their time
    depends on what other tests of the process have left."""
    gc.disable()
    try:
        start = time.process_time()
        work()
        return time.process_time() - start
    finally:
        gc.enable()


def best_cpu_s(work: Callable[[], object], tries: int = TRIES) -> float:
    """Return the least CPU time of a few calls, in seconds."""
    return min(cpu_s(work) for _ in range(tries))


def check_linear(seconds: Callable[[int], float], size: int, factor: int = 4) -> None:
    """Raise AssertionError if the CPU time grows more than MOST_GROWTH times as much as the input.

    seconds   measures the CPU time of an input of the given size
    factor    how many times larger the second input is
    """
    growth = math.inf
    for _ in range(TRIES):
        growth = min(growth, seconds(factor * size) / seconds(size))
        if growth <= factor * MOST_GROWTH:
            return
    raise AssertionError(f"{factor} times the input costs {growth:.1f} times the time")
