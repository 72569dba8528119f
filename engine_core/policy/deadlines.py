"""Until when requests must have been begun, and ended. Pure; times are seconds of a steady clock.

A heap with lazy removal: watch is O(log n), forget O(1). It holds times and numbers only, so that a
request that has ended is not kept by a deadline that is far away.
"""

from __future__ import annotations

import heapq
from math import inf

from engine_core.request import Request, RequestPhase
from protocol.errors import QueueTimeout, ServingError, TimedOut

SLACK = 1024
"""Entries of requests that have ended are dropped once they are more than the others, and this."""


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._watched: dict[int, Request] = {}  # by order of arrival

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> float:
        """Nothing is over before."""
        return self._heap[0][0] if self._heap else inf

    def watch(self, request: Request) -> None:
        """From now on; once more changes nothing."""
        if request.order in self._watched or min(request.begin_by, request.end_by) == inf:
            return
        self._watched[request.order] = request
        for entry in _entries(request):
            heapq.heappush(self._heap, entry)

    def forget(self, request: Request) -> None:
        """It has ended; one that is not watched is no error."""
        self._watched.pop(request.order, None)
        if len(self._heap) > 4 * len(self._watched) + SLACK:
            self._heap = [entry for kept in self._watched.values() for entry in _entries(kept)]
            heapq.heapify(self._heap)

    def over(self, now: float) -> list[Request]:
        """Those that are too late now, each once; whoever asks ends them."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            request = self._watched.get(heapq.heappop(self._heap)[1])
            if request is not None and (request.end_by <= now or not has_begun(request)):
                del self._watched[request.order]
                late.append(request)
        return late


def has_begun(request: Request) -> bool:
    """It had a slot, once."""
    return request.phase not in (RequestPhase.ARRIVED, RequestPhase.WAITING)


def lateness_of(request: Request, now: float, retry_after_s: float) -> ServingError:
    """What to say of one that is too late."""
    field, given_s = _limit(request, is_total=request.end_by <= now)
    if has_begun(request):
        return TimedOut(
            f"{field}: the {given_s:g} s that this request had are over; "
            f"{request.num_generated:,} tokens were generated",
            param=field,
        )
    return QueueTimeout(
        f"{field}: this request was not begun within the {given_s:g} s that it had; "
        "the server is busy",
        param=field,
        retry_after_s=retry_after_s,
    )


def hopeless(request: Request, wait_s: float, retry_after_s: float) -> QueueTimeout:
    """What to say of one that has just come, and cannot be begun before it is too late."""
    field, given_s = _limit(request, is_total=request.end_by < request.begin_by)
    return QueueTimeout(
        f"{field}: this request cannot be begun within the {given_s:g} s that it has; what waits "
        f"before it takes about {wait_s:.3g} s",
        param=field,
        retry_after_s=retry_after_s,
    )


def _limit(request: Request, *, is_total: bool) -> tuple[str, float]:
    """(the field that says it, how long from its arrival)."""
    if is_total:
        return "timeout_s", request.end_by - request.arrived_at
    return "queue_timeout_s", request.begin_by - request.arrived_at


def _entries(request: Request) -> list[tuple[float, int]]:
    return [(at, request.order) for at in (request.begin_by, request.end_by) if at < inf]
