"""Who takes a response's frames: a client's stream, nobody but the whole answer, or a run that goes
on without its client.

A response that is kept is in the store before its last event is out: its client may go on with it
at once, in any process.
"""

from __future__ import annotations

from collections.abc import Callable

import gevent
import msgspec

from gateway.connection import Outlet
from gateway.responses.events import Frame
from gateway.responses.response import Told
from gateway.store.runs import Run

Keep = Callable[[Told], None]
"""Puts a response into the store, where it is to be kept. Blocks."""


class StreamTaker:
    """The client's stream."""

    def __init__(self, outlet: Outlet, keep: Keep | None) -> None:
        self._outlet = outlet
        self._keep = keep

    def begun(self, response: Told) -> None:
        pass

    def write(self, frames: list[Frame]) -> None:
        self._outlet.write(b"".join(frames))

    def close(self, frames: list[Frame], response: Told) -> None:
        if self._keep is None:
            self._end(frames)
        else:
            gevent.spawn(self._keep_and_end, self._keep, frames, response)

    def _keep_and_end(self, keep: Keep, frames: list[Frame], response: Told) -> None:
        try:
            keep(response)
        finally:
            self._end(frames)

    def _end(self, frames: list[Frame]) -> None:
        self.write(frames)
        self._outlet.finish()


class WholeTaker:
    """The answer as one object: the stream's last word."""

    response: Told

    def begun(self, response: Told) -> None:
        pass

    def write(self, frames: list[Frame]) -> None:
        pass

    def close(self, frames: list[Frame], response: Told) -> None:
        self.response = response


class RunTaker:
    """A run, whose response is in the store from its beginning."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def begun(self, response: Told) -> None:
        self._run.note(msgspec.json.encode(response))

    def write(self, frames: list[Frame]) -> None:
        self._run.write(frames)

    def close(self, frames: list[Frame], response: Told) -> None:
        self._run.close(frames, msgspec.json.encode(response))
