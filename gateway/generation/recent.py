"""The timelines of the last inference requests of this process, by the names of the requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gateway.generation.timeline import Timeline
from protocol.engine.timeline import ClientTimes

MAX_REQUESTS = 1000
"""Most requests that are remembered, open ones included."""


class RecentRequests:
    """The last requests. An open request is remembered from the time at which it is sent."""

    def __init__(self) -> None:
        self._requests: deque[tuple[Sequence[str], Timeline]] = deque()
        self._by_label: dict[str, Timeline] = {}

    def add(self, labels: Sequence[str], timeline: Timeline) -> None:
        """Add a request with the labels that it has in the engine. If another one has the same
        label, the label finds this one from now on."""
        self._requests.append((labels, timeline))
        self._by_label.update(dict.fromkeys(labels, timeline))
        if len(self._requests) > MAX_REQUESTS:
            old, forgotten = self._requests.popleft()
            for label in old:
                if self._by_label.get(label) is forgotten:
                    del self._by_label[label]

    def find(self, label: str) -> ClientTimes | None:
        """Return the times of the last request with this label; None if it is not remembered, or
        another process has served it."""
        timeline = self._by_label.get(label)
        return None if timeline is None else timeline.client_times()
