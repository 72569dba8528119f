"""Reads an uploaded file (multipart/form-data) and stores it piece by piece.

The file is never in memory as a whole. Its fields may stand before or after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import gevent
from gunicorn.http.errors import NoMoreData, ParseException
from werkzeug.exceptions import (
    ClientDisconnected,
    RequestEntityTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Event, Field, File, MultipartDecoder, NeedData

from gateway.store.batch_database import UPLOAD_S
from protocol.wire.errors import InvalidRequest

READ_BYTES = 1 << 16
PIECE_BYTES = 1 << 18
"""Size of the pieces in which a file is stored."""
SILENCE_S = 60.0
"""Longest time for which nothing of the body arrives."""
MAX_FIELD_BYTES = 1 << 12
MAX_PARTS = 16
MAX_FILENAME_CHARS = 255
FILE_FIELD = "file"


class ByteSource(Protocol):
    def read(self, size: int, /) -> bytes: ...


class UploadSink(Protocol):
    """Receives the content of the file."""

    def begin(self, filename: str) -> None: ...
    def write(self, piece: bytes) -> None: ...


def read_upload(
    stream: ByteSource, content_type: str, max_bytes: int, sink: UploadSink
) -> Mapping[str, str]:
    """Read a body, pass its file to `sink`, and return its other fields. Raises these errors:

    InvalidRequest         the body is malformed or truncated, or has no file or two
    RequestEntityTooLarge  the file is longer than `max_bytes` (413)
    UnsupportedMediaType   the body is not multipart/form-data (415)
    RequestTimeout         nothing arrived for SILENCE_S seconds, or the body took UPLOAD_S (408)
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not boundary:
        raise UnsupportedMediaType("the body must be multipart/form-data with a boundary")
    reader = _UploadReader(max_bytes, sink)
    late = RequestTimeout(f"the upload took longer than {UPLOAD_S:g} s")
    with gevent.Timeout(UPLOAD_S, late):
        for event in _events(stream, boundary.encode("latin-1", "replace")):
            reader.on_event(event)
    return reader.finish()


class _UploadReader:
    def __init__(self, max_bytes: int, sink: UploadSink) -> None:
        self._max_bytes = max_bytes
        self._sink = sink
        self._fields: dict[str, str] = {}
        #: Name of the field that is being read; None while the file is.
        self._field: str | None = None
        self._has_file = False
        self._held: list[bytes] = []
        self._num_held = self._num_bytes = 0

    def on_event(self, event: Event) -> None:
        match event:
            case File(name=name, filename=filename):
                if name != FILE_FIELD or self._has_file:
                    raise InvalidRequest.at(FILE_FIELD, "the body must contain one file")
                self._field, self._has_file = None, True
                self._sink.begin(filename[:MAX_FILENAME_CHARS])
            case Field(name=name):
                if name == FILE_FIELD:
                    raise InvalidRequest.at(FILE_FIELD, "must be a file: it has no file name")
                if not name or name in self._fields:
                    raise InvalidRequest.at(f"{name}"[:64], "this field is given twice or unnamed")
                self._field = name
            case Data(data=data, more_data=more_data):
                self._hold(bytes(data))
                if not more_data:
                    self._end_part()

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._num_held += len(data)
        if self._field is not None:
            if self._num_held > MAX_FIELD_BYTES:
                raise InvalidRequest.at(self._field[:64], "this field is too long")
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            raise RequestEntityTooLarge(f"the file is larger than {self._max_bytes:,} bytes")
        if self._num_held >= PIECE_BYTES:
            self._sink.write(self._take())

    def _end_part(self) -> None:
        data = self._take()
        if self._field is None:
            if data:
                self._sink.write(data)
            return
        try:
            self._fields[self._field] = data.decode()
        except UnicodeDecodeError:
            raise InvalidRequest.at(self._field[:64], "must be text in UTF-8") from None

    def _take(self) -> bytes:
        data = b"".join(self._held)
        self._held, self._num_held = [], 0
        return data

    def finish(self) -> Mapping[str, str]:
        if not self._has_file:
            raise InvalidRequest.at(FILE_FIELD, "this field is required")
        return self._fields


def _events(stream: ByteSource, boundary: bytes) -> Iterator[Event]:
    """Yield the parts of a multipart body, until the end of the body. Raises InvalidRequest."""
    # The decoder holds about one read: the headers of a part, or what may begin a boundary.
    decoder = MultipartDecoder(boundary, 4 * READ_BYTES, max_parts=MAX_PARTS)
    is_over = False
    while not is_over:
        data = _read(stream)
        try:
            decoder.receive_data(data or None)
            event = decoder.next_event()
        except (ValueError, RequestEntityTooLarge):
            raise _malformed() from None
        while not isinstance(event, NeedData | Epilogue):
            yield event
            try:
                event = decoder.next_event()
            except (ValueError, RequestEntityTooLarge):
                raise _malformed() from None
        is_over = isinstance(event, Epilogue)


def _malformed() -> InvalidRequest:
    return InvalidRequest("the multipart body is malformed or truncated")


def _read(stream: ByteSource) -> bytes:
    late = RequestTimeout(f"nothing of the body arrived for {SILENCE_S:g} s")
    try:
        with gevent.Timeout(SILENCE_S, late):
            data = stream.read(READ_BYTES)
    except (NoMoreData, ClientDisconnected):
        raise InvalidRequest("the body is shorter than its Content-Length") from None
    except ParseException:
        raise InvalidRequest("the body's chunked transfer coding is malformed") from None
    gevent.sleep(0)  # reading from a socket that has data does not switch greenlets
    return data
