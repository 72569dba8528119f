"""Latencies as counts: how many were how long, in buckets whose bounds grow by a fixed factor.

A histogram costs the engine one addition for each entry, however many there are. Counts only grow,
so the counts of a period are the difference of two reports, and `quantiles` reads percentiles from
them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import sub

FIRST_BOUND_S = 0.0005
GROWTH = 1.2
NUM_BUCKETS = 80
"""The last bucket starts at about 15 minutes."""
_LOG_GROWTH = math.log(GROWTH)


def bucket(seconds: float) -> int:
    """Return the index of the bucket for a latency. The first one also has all that are shorter,
    the last one all that are longer."""
    if seconds <= FIRST_BOUND_S:
        return 0
    return min(int(math.log(seconds / FIRST_BOUND_S) / _LOG_GROWTH) + 1, NUM_BUCKETS - 1)


def bounds_s(index: int) -> tuple[float, float]:
    """Return the shortest and the longest latency of a bucket, in seconds."""
    low = 0.0 if index == 0 else FIRST_BOUND_S * GROWTH ** (index - 1)
    return low, FIRST_BOUND_S * GROWTH**index


def grown(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Return the counts that were added between two reports of one histogram. The first may be
    empty, which means that nothing was counted yet. If the counts have shrunk, because the engine
    was restarted, all of `now` were added."""
    if not before:
        return list(now)
    added = list(map(sub, now, before))
    return list(now) if min(added, default=0) < 0 else added


def quantiles(counts: Sequence[int], shares: Sequence[float]) -> list[float] | None:
    """Return, for each share, the latency in seconds that this share of the counted ones did not
    exceed. Within a bucket the entries count as evenly spread. Return None if nothing was
    counted."""
    below = list(accumulate(counts))
    if not below or not below[-1]:
        return None
    found = []
    for share in shares:
        rank = share * below[-1]
        index = bisect_left(below, rank) if rank > 0 else bisect_right(below, 0)
        low, high = bounds_s(index)
        left = rank - (below[index] - counts[index])
        found.append(low + (high - low) * max(0.0, left) / counts[index])
    return found
