"""Deadlines of requests: each may have one for its start and one for its end.

Times are arguments, in seconds of a steady clock. The deadlines are in a heap with lazy removal:
adding is O(log n), removing is O(1) on average. Heap entries refer to a request by its number, so
the memory of an ended request is freed before its deadlines pass.
"""

from __future__ import annotations

import heapq
from math import inf

from engine_core.requests.request import Request, RequestPhase
from protocol.wire.errors import QueueTimeout, ServingError, TimedOut

STALE_SLACK = 1024
"""Stale entries are removed from a heap of more than four entries per request plus this number."""


class Deadlines:
    """The deadlines of all open requests."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._requests: dict[int, Request] = {}  # by order of arrival

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> float:
        """Time of the earliest deadline; infinity if there is none. It may be that of a request
        that has ended or started."""
        return self._heap[0][0] if self._heap else inf

    def add(self, request: Request) -> None:
        """Add a request's deadlines. Adding it again changes nothing."""
        if request.order in self._requests or min(request.start_deadline, request.deadline) == inf:
            return
        self._requests[request.order] = request
        for entry in _entries(request):
            heapq.heappush(self._heap, entry)

    def remove(self, request: Request) -> None:
        """Remove the deadlines of a request that has ended, if it has any."""
        self._requests.pop(request.order, None)
        if len(self._heap) > 4 * len(self._requests) + STALE_SLACK:
            self._heap = [entry for kept in self._requests.values() for entry in _entries(kept)]
            heapq.heapify(self._heap)

    def pop_late(self, now: float) -> list[Request]:
        """Remove and return the requests that have missed a deadline. The caller ends them."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            request = self._requests.get(heapq.heappop(self._heap)[1])
            if request is not None and (request.deadline <= now or not has_started(request)):
                del self._requests[request.order]
                late.append(request)
        return late


def has_started(request: Request) -> bool:
    """Return whether the request has ever had a slot."""
    return request.phase not in (RequestPhase.ARRIVED, RequestPhase.WAITING)


def timeout_error(request: Request, now: float, retry_after_s: float) -> ServingError:
    """Return the error of a request that has missed a deadline: TimedOut if it has started, else
    QueueTimeout with `retry_after_s`."""
    field, given_s = _limit(request, is_total=request.deadline <= now)
    if has_started(request):
        done = f"{request.num_generated:,} tokens were generated"
        if request.encode is not None:
            done = f"{request.encode.num_done:,} inputs were encoded"
        return TimedOut(
            f"{field}: the request did not finish within {given_s:g} s; {done}", param=field
        )
    return QueueTimeout(
        f"{field}: the request was not started within {given_s:g} s; the server is busy",
        param=field,
        retry_after_s=retry_after_s,
    )


def queue_timeout_error(request: Request, wait_s: float, retry_after_s: float) -> QueueTimeout:
    """Return the error of a new request whose deadline comes before its expected start, `wait_s`
    seconds from now."""
    field, given_s = _limit(request, is_total=request.deadline < request.start_deadline)
    return QueueTimeout(
        f"{field}: the request cannot be started within {given_s:g} s; the requests ahead of it "
        f"take about {wait_s:.3g} s",
        param=field,
        retry_after_s=retry_after_s,
    )


def _limit(request: Request, *, is_total: bool) -> tuple[str, float]:
    """Return (request field, seconds after arrival) of one of the two deadlines.

    `is_total` selects the deadline for the end, otherwise that for the start.
    """
    if is_total:
        return "timeout_s", request.deadline - request.arrived_at
    return "queue_timeout_s", request.start_deadline - request.arrived_at


def _entries(request: Request) -> list[tuple[float, int]]:
    return [(at, request.order) for at in (request.start_deadline, request.deadline) if at < inf]
