"""Who takes a response's frames: a client's stream, nobody but the whole answer, or a run that goes
on without its client.

A response that is kept is in the store before its last event is out: its client may go on with it
at once, in any process.
"""

from __future__ import annotations

from collections.abc import Callable

import gevent
import msgspec

from gateway.api.responses.events import Frame, last_frame
from gateway.api.responses.response import Told
from gateway.http.client_socket import Outlet
from gateway.store.runs import DetachedRun

Keep = Callable[[Told], Told]
"""Puts a response into the store: the response as it is to be told then, which says if that could
not be done. Blocks."""


class StreamFrameWriter:
    """The client's stream."""

    def __init__(self, outlet: Outlet, keep: Keep | None) -> None:
        self._outlet = outlet
        self._keep = keep

    def begun(self, response: Told) -> None:
        pass

    def write(self, frames: list[Frame]) -> None:
        self._outlet.write(b"".join(frames))

    def close(self, response: Told, number: int) -> None:
        gevent.spawn(self._end, response, number)

    def _end(self, response: Told, number: int) -> None:
        """The last event is the whole answer once more, so it waits for what is before it."""
        try:
            if self._keep is not None:
                response = self._keep(response)
        except BaseException:
            self._outlet.cut()  # or its client would wait for ever
            raise
        self._outlet.await_room()
        self._outlet.write(last_frame(number, response))
        self._outlet.finish()


class WholeResponseWriter:
    """The answer as one object: the stream's last word."""

    response: Told

    def begun(self, response: Told) -> None:
        pass

    def write(self, frames: list[Frame]) -> None:
        pass

    def close(self, response: Told, number: int) -> None:
        self.response = response


class RunFrameWriter:
    """A run, whose response is in the store from its beginning."""

    def __init__(self, run: DetachedRun) -> None:
        self._run = run

    def begun(self, response: Told) -> None:
        self._run.note(msgspec.json.encode(response))

    def write(self, frames: list[Frame]) -> None:
        self._run.write(frames)

    def close(self, response: Told, number: int) -> None:
        self._run.close([last_frame(number, response)], msgspec.json.encode(response))
