"""Destinations of a response's frames: the client's stream, a complete response, or a run that
continues without its client.

A stored response is in the store before its last event is sent, because the client may continue it
at once, on any process.
"""

from __future__ import annotations

from collections.abc import Callable

import gevent
import msgspec

from gateway.api.responses.events import Frame, last_frame
from gateway.api.responses.response import Json
from gateway.http.client_socket import Outlet
from gateway.store.runs import DetachedRun

StoreResponse = Callable[[Json], Json]
"""Stores a response and returns the response to send, in which `store` is false if that failed.
Blocks."""


class StreamFrameWriter:
    """Writes to the client's stream."""

    def __init__(self, outlet: Outlet, store: StoreResponse | None) -> None:
        self._outlet = outlet
        self._store = store

    def start(self, response: Json) -> None:
        pass

    def write(self, frames: list[Frame]) -> None:
        self._outlet.write(b"".join(frames))

    def close(self, response: Json, number: int) -> None:
        gevent.spawn(self._end, response, number)

    def _end(self, response: Json, number: int) -> None:
        """Send the last event once the client has read the earlier ones: it repeats the whole
        response."""
        try:
            if self._store is not None:
                response = self._store(response)
        except BaseException:
            self._outlet.cut()  # otherwise the client would wait forever
            raise
        self._outlet.wait_drained()
        self._outlet.write(last_frame(number, response))
        self._outlet.finish()


class WholeResponseWriter:
    """Keeps the final response and ignores the frames."""

    response: Json

    def start(self, response: Json) -> None:
        pass

    def write(self, frames: list[Frame]) -> None:
        pass

    def close(self, response: Json, number: int) -> None:
        self.response = response


class RunFrameWriter:
    """Writes to a detached run, whose response is in the store from the start."""

    def __init__(self, run: DetachedRun) -> None:
        self._run = run

    def start(self, response: Json) -> None:
        self._run.note(msgspec.json.encode(response))

    def write(self, frames: list[Frame]) -> None:
        self._run.write(frames)

    def close(self, response: Json, number: int) -> None:
        self._run.close([last_frame(number, response)], msgspec.json.encode(response))
