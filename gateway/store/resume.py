"""Streams that a client can resume: their event ids are `id: STREAM:NUMBER`, numbered from 0.

A resumed stream has the same bytes after event k as the uninterrupted stream. Keep-alives are
comments, not events, and have no number.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence

PREFIX = "stream_"
_END = b"\n\n"
_EVENT_ID = re.compile(rf"({PREFIX}[0-9a-f]{{32}}):(\d{{1,18}})")


def new_stream_id() -> str:
    return PREFIX + uuid.uuid4().hex


def read_event_id(text: str) -> tuple[str, int] | None:
    """Parse an event id into (stream, number); None if this server did not create it."""
    found = _EVENT_ID.fullmatch(text.strip())
    return (found[1], int(found[2])) if found else None


class Numbered:
    """Adds ids to the frames of a stream and passes them on.

    write   receives each list of frames
    finish  called after the last frame
    """

    def __init__(
        self, stream: str, write: Callable[[Sequence[bytes]], None], finish: Callable[[], None]
    ) -> None:
        self._stream = stream.encode()
        self._write = write
        self._number = 0
        self.finish = finish

    def write(self, data: bytes) -> None:
        """Write complete frames. Each ends with an empty line; JSON contains no line breaks."""
        frames = data.split(_END)
        assert not frames.pop(), "a frame ends with an empty line"
        first, self._number = self._number, self._number + len(frames)
        self._write([self._with_id(frame, n) for n, frame in enumerate(frames, first)])

    def _with_id(self, frame: bytes, number: int) -> bytes:
        return with_id(self._stream, number, frame + _END)


def with_id(stream: bytes, number: int, frame: bytes) -> bytes:
    return b"id: %b:%d\n%b" % (stream, number, frame)
