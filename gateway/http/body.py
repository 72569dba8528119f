"""Reads the JSON body of a request and converts it to a checked struct. Errors name the field.

The JSON is decoded once. Its size and its numbers of strings, containers and values are checked
while it is read. msgspec checks types and bounds while the decoded body is converted to a struct.
This module does not depend on the meaning of any field.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from functools import cache, partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, TypeVar

import gevent
import msgspec
from flask import Request
from gevent.lock import BoundedSemaphore
from gunicorn.http.errors import NoMoreData, ParseException
from werkzeug.exceptions import (
    ClientDisconnected,
    RequestEntityTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)

from gateway.http.body_memory import BodyMemory
from gateway.http.json_size import USUAL_BOUNDS, JsonBounds, JsonCounter, too_much
from protocol.wire.errors import InvalidRequest
from protocol.wire.field_errors import FIELD_NAME, field_error

MAX_LISTED_FIELDS = 16
"""Maximum number of unknown fields that a response lists."""
MAX_NAMED_LEVELS = 8
"""Maximum depth of the path with which an error names an invalid number."""
BODY_S = 60
"""Longest time for a body to arrive."""
SMALL_BYTES = 1 << 18
"""Bodies up to this size do not count in `BodyMemory`."""
GROWTH_BYTES = 1 << 18
"""Step in which the memory of a large body grows while it arrives."""
WAIT_S = 20
"""Longest time for which a large body waits for memory."""
MIN_BYTES_PER_S = 1 << 16
"""Lowest rate at which a body must arrive on average, from the moment that it holds memory."""
SLOW_S = 5
"""Time by which a body may lag behind that rate."""
PAUSE_S = 0.001
"""Pause before decoding a large body, in which other greenlets run."""
MAX_SEARCHED_BYTES = 1 << 20
"""In a longer body, the path of an invalid number is not searched, because each level of the search
reads the body again."""
_PIECE_BYTES = 1 << 14
OWNER = "tidegate.body.owner"
"""Key in the WSGI environment of whose share of the memory a body uses."""
RESERVATION = "tidegate.body.reservation"
"""Key in the WSGI environment of the memory that a large body uses (`BodyReservation`). The
application closes it when the request has ended."""
WHOLE = "tidegate.body.whole"
"""Key in the WSGI environment of a body that is in memory already. Its sender limits the memory."""

T = TypeVar("T")
K = TypeVar("K", int, str)
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BodyReader:
    """Reads and decodes the JSON bodies of the requests to this process.

    max_bytes  size limit of one body
    memory     the memory for large bodies
    """

    def __init__(self, max_bytes: int, memory: BodyMemory) -> None:
        self._max_bytes = max_bytes
        self.memory = memory
        self._decoding = BoundedSemaphore()  # large bodies are decoded one at a time

    def parse(self, request: Request, kind: type[T], bounds: JsonBounds = USUAL_BOUNDS) -> T:
        """Return the body of a request as a struct. Raises the errors of `read` and `convert`."""
        with self.read(request, bounds) as fields:
            return convert(fields, kind)

    def parse_known(
        self, request: Request, kind: type[T], bounds: JsonBounds = USUAL_BOUNDS
    ) -> tuple[T, list[str]]:
        """Return the body of a request as a struct, and its unknown fields (`unknown_fields`).
        Raises the errors of `read` and `convert`."""
        with self.read(request, bounds) as fields:
            return convert(fields, kind), unknown_fields(fields, kind)

    @contextlib.contextmanager
    def read(
        self, request: Request, bounds: JsonBounds = USUAL_BOUNDS, *, any_type: bool = False
    ) -> Iterator[Any]:
        """Yield the decoded JSON body of a request. It must be converted inside the `with` block.

        any_type  treat the body as JSON whatever its content type is

        A request without a content type is treated as JSON. Raises these errors:

        InvalidRequest         the body is truncated, malformed or exceeds `bounds`
        RequestEntityTooLarge  the body is longer than `max_bytes` (413)
        UnsupportedMediaType   the content type is not JSON, or the body is compressed (415)
        RequestTimeout         the body takes longer than BODY_S to arrive (408)
        Overloaded             too many large bodies are being read
        """
        _check_type(request, any_type=any_type)
        with contextlib.ExitStack() as held:
            try:
                with gevent.Timeout(
                    BODY_S, RequestTimeout(f"the body did not arrive within {BODY_S} s")
                ):
                    data = self._receive(request, bounds, held)
            except (NoMoreData, ClientDisconnected):
                raise InvalidRequest("the body is shorter than its Content-Length") from None
            except ParseException:
                raise InvalidRequest("the body's chunked transfer coding is malformed") from None
            if len(data) > SMALL_BYTES:
                held.enter_context(self._decoding)
                fields = _decode_large(data)
            else:
                fields = decode_json(data)
            yield fields

    def _receive(
        self, request: Request, bounds: JsonBounds, held: contextlib.ExitStack
    ) -> bytes | memoryview:
        """Return the bytes of the body. Add the release of its buffer to `held`. The body counts in
        `BodyMemory` until its request has ended, because the request may keep any part of it."""
        length = request.content_length
        too_large = partial(
            RequestEntityTooLarge, f"the body is larger than {self._max_bytes:,} bytes"
        )
        if length is not None and length > self._max_bytes:
            raise too_large()
        if (whole := request.environ.get(WHOLE)) is not None:
            return _counted(whole, JsonCounter(bounds))
        counter = JsonCounter(bounds)
        arrival = _Arrival(request)
        pieces: list[bytes] = []
        large: mmap | None = None
        num_bytes = 0
        while piece := arrival.read():
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise too_large()
            pieces.append(piece)
            excess = counter.push(piece)
            if num_bytes > SMALL_BYTES and not excess:
                if large is None:
                    size = self._max_bytes if length is None else length
                    owner = request.environ.get(OWNER, "")
                    reservation = self.memory.reservation(owner, size)
                    request.environ[RESERVATION] = reservation
                    large = held.enter_context(mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS))
                while reservation.num_held < num_bytes:
                    with arrival.paused():
                        reservation.grow(GROWTH_BYTES, WAIT_S)
                large.write(b"".join(pieces))
                pieces.clear()
            if excess:
                so_far = large[: large.tell()] if large is not None else b""
                raise too_much(so_far + b"".join(pieces), excess)
            if large is not None:
                gevent.sleep(0)  # reading from a socket that has data does not switch greenlets
        if length is not None and num_bytes < length:  # gunicorn does not report this
            raise ClientDisconnected
        if large is None:
            return b"".join(pieces)
        reservation.keep()
        return held.enter_context(memoryview(large)[:num_bytes])


class _Arrival:
    """Reads the body of a request in pieces. After the first use of `paused`, a body that arrives
    too slowly is an error."""

    def __init__(self, request: Request) -> None:
        self._stream = request.stream
        #: When the next piece must have arrived, on time.monotonic's clock; None: at any time.
        self._until: float | None = None

    def read(self) -> bytes:
        """Return the next piece; b"" at the end. Raises RequestTimeout if it is too late."""
        if self._until is None:
            return self._stream.read(_PIECE_BYTES)
        self._until += _PIECE_BYTES / MIN_BYTES_PER_S
        too_slow = f"the body arrives at less than {MIN_BYTES_PER_S >> 10} KiB per second"
        left_s = max(self._until - time.monotonic(), 0.001)
        with gevent.Timeout(left_s, RequestTimeout(too_slow)):
            return self._stream.read(_PIECE_BYTES)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in the `with` block, in which the body waits for memory."""
        started_at = time.monotonic()
        yield
        if self._until is None:
            self._until = started_at + SLOW_S
        self._until += time.monotonic() - started_at


def _counted(data: bytes, counter: JsonCounter) -> bytes:
    """Count the values of a complete body, and return it. Raises InvalidRequest if there are too
    many."""
    for end in range(_PIECE_BYTES, len(data) + _PIECE_BYTES, _PIECE_BYTES):
        if excess := counter.push(data[end - _PIECE_BYTES : end]):
            raise too_much(data[:end], excess)
    return data


def _check_type(request: Request, *, any_type: bool) -> None:
    """Raise UnsupportedMediaType if the body is not plain JSON, according to the headers."""
    encoding = request.headers.get("Content-Encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        name = encoding if FIELD_NAME.fullmatch(encoding) else "this encoding"
        raise UnsupportedMediaType(f"Content-Encoding: {name} is not supported; send plain JSON")
    if request.mimetype and not request.is_json and not any_type:
        raise UnsupportedMediaType(
            f"the body must be application/json, not {request.mimetype}: send it with the header "
            "Content-Type: application/json"
        )


def _decode_large(data: bytes | memoryview) -> Any:
    """Decode a large body, and then pause for as long as that took, so that other greenlets get as
    much time as the decoding of large bodies."""
    gevent.sleep(PAUSE_S)
    started_at = time.perf_counter()
    try:
        return decode_json(data)
    finally:
        gevent.sleep(time.perf_counter() - started_at)


def decode_json(data: bytes | memoryview) -> Any:
    """Return the value of a JSON text. Raises InvalidRequest if the text is malformed, nested too
    deeply or contains a number that is too large. The error's `param` is then the path of that
    number, unless the text is longer than MAX_SEARCHED_BYTES."""
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError:
        message = "the number is out of range"
        path = _invalid_number(bytes(data)) if len(data) <= MAX_SEARCHED_BYTES else None
        raise InvalidRequest(f"{path}: {message}" if path else message, param=path) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _invalid_number(data: bytes) -> str | None:
    """Return the path of the first value that msgspec cannot represent. The path has at most
    MAX_NAMED_LEVELS levels. None: a key in the path is not safe to show."""
    path = ""
    value = msgspec.Raw(data)
    for _ in range(MAX_NAMED_LEVELS):
        first = bytes(value).lstrip()[:1]
        if first == b"[":
            index, value = _first_invalid(enumerate(_items(value)))
            path += f"[{index}]"
        elif first == b"{":
            key, value = _first_invalid(_members(value).items())
            if not FIELD_NAME.fullmatch(key):
                return None
            path += f".{key}"
        else:
            break
    return path.removeprefix(".") or None


def _first_invalid(values: Iterable[tuple[K, msgspec.Raw]]) -> tuple[K, msgspec.Raw]:
    """Return the first (index or key, value) whose value msgspec cannot represent."""
    return next((key, value) for key, value in values if not _is_valid(value))


def _is_valid(data: msgspec.Raw) -> bool:
    try:
        msgspec.json.decode(data)
    except msgspec.ValidationError:
        return False
    return True


def convert(fields: Any, kind: type[T]) -> T:
    """Return a decoded body as a struct of type `kind`. Raises InvalidRequest, whose `param` is the
    path of the invalid field."""
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        found = field_error(error, fields, kind)
        raise InvalidRequest(str(found), param=found.path or None) from None


def decode(data: bytes, kind: type[T]) -> T:
    """Return a JSON body as a struct. Raises the errors of `decode_json` and `convert`."""
    return convert(decode_json(data), kind)


def unknown_fields(fields: dict[str, Any], kind: type) -> list[str]:
    """Return the names of the top-level fields that the struct `kind` does not have.

    Such fields are accepted and have no effect. At most MAX_LISTED_FIELDS names are returned, and
    only names that are safe in a header.
    """
    known = _field_names(kind)
    names = [name for name in fields if name not in known]
    return [name for name in names if FIELD_NAME.fullmatch(name)][:MAX_LISTED_FIELDS]


@cache
def _field_names(kind: type) -> frozenset[str]:
    """Return the names of a struct's fields in JSON. The result is cached, because computing it
    takes longer than decoding a request."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))
