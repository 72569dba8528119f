"""Who takes a response's frames: a client's stream, or nobody but the whole answer.

A response that is kept is in the store before its last event is out: its client may go on with it
at once, in any process.
"""

from __future__ import annotations

from collections.abc import Callable

import gevent

from gateway.connection import Outlet
from gateway.responses.events import Frame
from gateway.responses.response import Told

Keep = Callable[[Told], None]
"""Puts a response into the store, where it is to be kept. Blocks."""


class StreamTaker:
    """The client's stream."""

    def __init__(self, outlet: Outlet, keep: Keep) -> None:
        self._outlet = outlet
        self._keep = keep

    def write(self, frames: list[Frame]) -> None:
        self._outlet.write(b"".join(frames))

    def close(self, frames: list[Frame], response: Told) -> None:
        gevent.spawn(self._end, frames, response)

    def _end(self, frames: list[Frame], response: Told) -> None:
        try:
            self._keep(response)
        finally:
            self.write(frames)
            self._outlet.finish()


class WholeTaker:
    """The answer as one object: the stream's last word."""

    response: Told

    def write(self, frames: list[Frame]) -> None:
        pass

    def close(self, frames: list[Frame], response: Told) -> None:
        self.response = response
