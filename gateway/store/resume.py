"""Resumable streams: the ids of their events, and reading a stream from the store.

The line `id: STREAM:NUMBER` of an event contains its id. The events of a stream are numbered from
0. A stream that is resumed after event k has the same bytes as the uninterrupted stream has after
event k. Keep-alives have no number, because they are comments, not events.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Sequence

import gevent

from gateway.http.client_socket import Outlet
from gateway.store.database import Database
from gateway.store.queries import RunPage
from gateway.store.sqlite_file import Store

log = logging.getLogger(__name__)

PREFIX = "stream_"
POLL_S = 0.1
"""Interval at which the store is read for new events of an open run."""
WANT_EVERY_S = 1.0
"""Interval at which a run is marked as wanted while a client reads it."""
_END = b"\n\n"
_EVENT_ID = re.compile(rf"({PREFIX}[0-9a-f]{{32}}):(\d{{1,18}})")


def new_stream_id() -> str:
    return PREFIX + uuid.uuid4().hex


def read_event_id(text: str) -> tuple[str, int] | None:
    """Return (stream id, number) of an event id; None if `text` is not an id of this server."""
    found = _EVENT_ID.fullmatch(text.strip())
    return (found[1], int(found[2])) if found else None


class NumberedFrames:
    """Adds event ids to the frames of a stream and passes the frames on.

    write   receives each list of frames with their ids
    finish  called by the writer of the stream after its last frame
    """

    def __init__(
        self, stream: str, write: Callable[[Sequence[bytes]], None], finish: Callable[[], None]
    ) -> None:
        self._stream = stream.encode()
        self._write = write
        self._number = 0
        self.finish = finish

    def write(self, data: bytes) -> None:
        """Pass on the complete frames in `data`.

        A frame ends with an empty line. It has no other empty line, because JSON is encoded without
        line breaks.
        """
        frames = data.split(_END)
        assert not frames.pop(), "a frame ends with an empty line"
        first, self._number = self._number, self._number + len(frames)
        self._write([self._with_id(frame, n) for n, frame in enumerate(frames, first)])

    def _with_id(self, frame: bytes, number: int) -> bytes:
        return with_id(self._stream, number, frame + _END)


def with_id(stream: bytes, number: int, frame: bytes) -> bytes:
    """Return the SSE frame `frame` with an `id:` line: event `number` of the stream `stream`."""
    return b"id: %b:%d\n%b" % (stream, number, frame)


class RunTail:
    """Writes the stored events of a run after event `after`, and new ones until its end.

    The process that generates the run may be another one. While a client is attached, the run is
    marked as wanted for the next `window_s` seconds, so it continues.
    """

    def __init__(
        self, store: Store[Database], run: str, owner: str, after: int, window_s: float
    ) -> None:
        self._store = store
        self._run, self._owner = run, owner
        self._after = after
        self._window_s = window_s
        self._wanted_at = 0.0
        self._greenlet: gevent.Greenlet[..., None] | None = None

    def attach(self, outlet: Outlet) -> None:
        """Start writing to the client's outlet, in a greenlet."""
        self._greenlet = gevent.spawn(self._write_all, outlet)

    def detach(self) -> None:
        """Stop writing: the client has disconnected or the stream is over."""
        if self._greenlet is not None:
            self._greenlet.kill(block=False)

    def _write_all(self, outlet: Outlet) -> None:
        try:
            while not outlet.is_cut and self._write_page(outlet):
                pass
        except sqlite3.Error:
            log.exception("cannot read a stream from the store")
            outlet.cut()
        outlet.finish()

    def _write_page(self, outlet: Outlet) -> bool:
        """Write the next events, or wait if there are none. Return whether there may be more."""
        page = self._page(time.time())
        if page is None:  # the run was deleted
            return False
        if page.frames:
            self._after += len(page.frames)
            outlet.write(b"".join(page.frames))
            outlet.wait_drained()
        elif not page.is_last:
            gevent.sleep(POLL_S)
        return not page.is_last

    def _page(self, now: float) -> RunPage | None:
        """Return the next events; None if the run was deleted."""
        if now - self._wanted_at >= WANT_EVERY_S:
            self._wanted_at = now
            self._store.call(lambda database: database.want(self._run, now + self._window_s))
        return self._store.call(
            lambda database: database.page(self._run, self._owner, self._after, now)
        )
