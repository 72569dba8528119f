"""CPU time of pure code. It is only ever compared with other CPU time of the same run.

A bound in seconds would measure the machine. Other processes only ever add time, so the least time
of a few tries is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

TRIES = 5
MOST_GROWTH = 1.5
"""How much more than its share a larger input may cost: linear is 1, and n log n is under 1.2 for
the sizes used here. Quadratic time is the factor between the sizes, which is 4."""


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time of one call, in seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def best_cpu_s(work: Callable[[], object], tries: int = TRIES) -> float:
    """Return the least CPU time of a few calls, in seconds."""
    return min(cpu_s(work) for _ in range(tries))


def check_linear(seconds: Callable[[int], float], size: int, factor: int = 4) -> None:
    """Raise AssertionError if `factor` times the input costs more than its share.

    seconds   measures the CPU time of an input of the given size
    """
    growth = math.inf
    for _ in range(TRIES):
        growth = min(growth, seconds(factor * size) / seconds(size))
        if growth <= factor * MOST_GROWTH:
            return
    raise AssertionError(f"{factor} times the input costs {growth:.1f} times the time")
