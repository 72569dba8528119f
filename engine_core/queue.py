"""Who waits, in which order, and how much work that is.

Order: priority, then arrival. A preempted request keeps its place in the order of arrival, so it
comes back before everything that arrived after it.
"""

from __future__ import annotations

import heapq

from engine_core.request import Request


class WaitingQueue:
    """A heap with lazy removal: push and pop O(log n), remove O(1).

    `tokens`: known tokens waiting.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._heap: list[tuple[int, int, Request]] = []
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (*request.rank, request))
        self._waiting.add(request)
        self.tokens += len(request.tokens)

    def first(self) -> Request | None:
        while self._heap:
            request = self._heap[0][2]
            if request in self._waiting:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Raises KeyError if it does not wait here."""
        self._waiting.remove(request)
        self.tokens -= len(request.tokens)
        if not self._waiting:
            self._heap.clear()
