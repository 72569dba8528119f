"""The timelines that clients wait for. They are computed in short slices between the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine_core.history.history import TimelineWork
from engine_core.history.requests import MAX_ENDED, MAX_ENDED_S
from protocol.engine.messages import GetTimeline, Refused, RequestTimelines
from protocol.engine.timeline import EngineTimeline
from protocol.wire.errors import Overloaded

MAX_WAITING = 64
"""Most GetTimeline messages that wait for their answer."""


@dataclass(slots=True)
class _Waiting:
    """A client that waits for timelines."""

    client: bytes
    request: int
    work: TimelineWork


class TimelineQueue:
    """Answers GetTimeline messages one after the other."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a client waits, so that `run` has work to do."""
        return bool(self._waiting)

    def add(self, client: bytes, message: GetTimeline, work: TimelineWork) -> Refused | None:
        """Queue the work for a message. Return the refusal if too many messages wait already."""
        if len(self._waiting) >= MAX_WAITING:
            error = Overloaded(
                f"{MAX_WAITING} requests for timelines already wait: try again", retry_after_s=1
            )
            return Refused(request=message.request, error=error.info())
        self._waiting.append(_Waiting(client, message.request, work))
        return None

    def remove(self, client: bytes) -> None:
        """Drop the messages of a client that is gone."""
        self._waiting = deque(each for each in self._waiting if each.client != client)

    def run(
        self, slice_s: float, clock: Callable[[], float]
    ) -> list[tuple[bytes, RequestTimelines]]:
        """Work for about `slice_s` seconds of `clock`. Return (client, answer) for each message
        that is answered now."""
        answers: list[tuple[bytes, RequestTimelines]] = []
        until = clock() + slice_s
        while self._waiting:
            first = self._waiting[0]
            try:
                next(first.work)
            except StopIteration as end:
                self._waiting.popleft()
                answers.append((first.client, timelines_answer(first.request, end.value)))
            if clock() >= until:
                break
        return answers


def timelines_answer(request: int, timelines: list[EngineTimeline]) -> RequestTimelines:
    """Return the answer to the GetTimeline with this number."""
    return RequestTimelines(
        request=request, timelines=timelines, kept=MAX_ENDED, kept_s=MAX_ENDED_S
    )
