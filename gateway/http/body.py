"""Request bytes -> a checked struct. Errors name the field at fault.

Sizes and counts are checked while the body is read, types and bounds while it is decoded (msgspec),
and nesting after that. This module does not depend on the meaning of any field.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import gevent
import msgspec
from flask import Request
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from gunicorn.http.errors import NoMoreData, ParseException
from werkzeug.exceptions import (
    ClientDisconnected,
    RequestEntityTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)

from gateway.http.json_size import USUAL_BOUNDS, JsonBounds, JsonCounter, too_much
from protocol.errors import InvalidRequest, Overloaded

MAX_DEPTH = 64
"""Most nested objects and arrays in a field without a schema (tools, template arguments)."""
MAX_VALUES = 200_000
"""Most values in such a field, on all levels."""
MAX_LISTED_FIELDS = 16
MAX_SHOWN_CHARS = 64
"""The most characters of a request's key that an error shows."""
MAX_SHORT_VALUES = 256
BODY_S = 60
SMALL_BYTES = 1 << 18
"""Bodies up to this size do not count in `BodyMemory`."""
NUM_LARGE = 4
"""Bodies of the largest size that are in memory at once."""
WAIT_S = 20
"""The longest time that a large body waits for others to be decoded."""
TURN_S = 0.001
"""The pause for other greenlets between two uninterruptible parts of the work on a large body."""
_PIECE_BYTES = 1 << 16

T = TypeVar("T")
_WHERE = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_PLACE = re.compile(r"\[\d+\]")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_ANY_KEY = "[...]"
"""How msgspec's paths write any key of a mapping."""
_MISSING = re.compile(r"missing required field `([^`]+)`")
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyMemory:
    """Bounds the memory of the large bodies that are being read and decoded, in order of arrival.

    Bodies that wait stay unread in the sockets of their clients.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_free = num_bytes
        self._waiting: deque[tuple[int, Event]] = deque()

    def acquire(self, num_bytes: int, timeout_s: float) -> None:
        """Wait for this much memory. Raises Overloaded after `timeout_s`."""
        turn = Event()
        entry = (num_bytes, turn)
        self._waiting.append(entry)
        self._admit()
        try:
            if not turn.wait(timeout_s):
                raise Overloaded(
                    "too many requests with large bodies at the same time", retry_after_s=1
                )
        except BaseException:
            if turn.is_set():
                self.release(num_bytes)
            else:
                self._waiting.remove(entry)
                self._admit()
            raise

    def release(self, num_bytes: int) -> None:
        self._num_free += num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_free:
            num_bytes, turn = self._waiting.popleft()
            self._num_free -= num_bytes
            turn.set()


class BodyReader:
    """Reads and decodes the JSON bodies of one process. Each has at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._memory = BodyMemory(NUM_LARGE * max_bytes)
        self._decoding = BoundedSemaphore()  # large bodies, one at a time

    def parse(
        self, request: Request, decoder: msgspec.json.Decoder[T], bounds: JsonBounds = USUAL_BOUNDS
    ) -> T:
        """Return the struct of a body; raises as `read` and `decode`."""
        with self.read(request, bounds) as data:
            return decode(data, decoder)

    def parse_known(
        self, request: Request, decoder: msgspec.json.Decoder[T], bounds: JsonBounds = USUAL_BOUNDS
    ) -> tuple[T, list[str]]:
        """Return the struct of a body, and the names of its `unknown_fields`."""
        with self.read(request, bounds) as data:
            body = decode(data, decoder)
            if len(data) > SMALL_BYTES:
                gevent.sleep(TURN_S)
            return body, unknown_fields(data, type(body))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def read(self, request: Request, bounds: JsonBounds = USUAL_BOUNDS) -> Iterator[bytes]:
        """Yield the body of a JSON request. It must be decoded inside the `with`.

        A request without a content type is treated as JSON. Raises 413 if the body is longer than
        `max_bytes`, 415 for another content type, 408 if it takes longer than BODY_S to arrive,
        InvalidRequest if it is truncated, malformed or exceeds `bounds`, and Overloaded if too many
        large bodies are being read.
        """
        _check_type(request)
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
                gevent.sleep(TURN_S)
            yield data

    def _receive(self, request: Request, bounds: JsonBounds, held: contextlib.ExitStack) -> bytes:
        length = request.content_length
        too_large = RequestEntityTooLarge(f"the body is larger than {self._max_bytes:,} bytes")
        if length is not None and length > self._max_bytes:
            raise too_large
        counter = JsonCounter(bounds)
        pieces: list[bytes] = []
        num_bytes = num_held = 0
        while piece := request.stream.read(_PIECE_BYTES):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise too_large
            if excess := counter.push(piece):
                raise too_much(b"".join(pieces), excess)
            if num_bytes > SMALL_BYTES:
                if not num_held:
                    num_held = self._max_bytes if length is None else length
                    self._memory.acquire(num_held, WAIT_S)
                    held.callback(self._memory.release, num_held)
                gevent.sleep(0)  # reading a socket that has data never switches greenlets
        if length is not None and num_bytes < length:  # gunicorn returns a truncated body as it is
            raise ClientDisconnected
        return b"".join(pieces)


def _check_type(request: Request) -> None:
    encoding = request.headers.get("Content-Encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        name = encoding if _FIELD_NAME.fullmatch(encoding) else "this encoding"
        raise UnsupportedMediaType(f"Content-Encoding: {name} is not supported; send plain JSON")
    if request.mimetype and not request.is_json:
        raise UnsupportedMediaType(f"the body must be application/json, not {request.mimetype}")


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises InvalidRequest; `param` is the path of the invalid field, if it is known."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), data, decoder) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _invalid_field(text: str, data: bytes, decoder: msgspec.json.Decoder[Any]) -> InvalidRequest:
    """Return the error for msgspec's message, such as "Expected `int` >= 1 - at `$.n`"."""
    where = _WHERE.search(text)
    path = where[2] if where else ""
    message = text[: where.start()] if where else text
    if missing := _MISSING.search(message):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{path}: this field is required", param=path)
    mapping, is_inside, rest = path.partition(_ANY_KEY)
    if is_inside or (where and where[1]):
        try:
            key = _key_at_fault(text, data, decoder, mapping)
        except (ValueError, LookupError, RecursionError):  # malformed later on, or a duplicate key
            key = None
        if key is not None and _FIELD_NAME.fullmatch(key):
            path = f"{mapping}.{key}{rest}"
        if key is not None and not is_inside:
            message = f"the key {key[:MAX_SHOWN_CHARS]!r}: {message}"
    param = path.replace(_ANY_KEY, "") or None
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)


def _key_at_fault(
    text: str, data: bytes, decoder: msgspec.json.Decoder[Any], path: str
) -> str | None:
    """Return the key of the mapping at `path` that `decoder` rejects; None if it is not found.

    msgspec does not name the key. So the mapping is decoded again with fewer of its members, until
    the first is found with which the error is the same. Of the values around the mapping, only
    short ones are decoded again: they may determine its type.
    """
    steps = [int(place) if place else name for place, name in _STEP.findall(path)]
    around: list[dict[str, msgspec.Raw]] = []
    inner = msgspec.Raw(data)
    for step in steps:
        if isinstance(step, int):
            inner = msgspec.json.decode(inner, type=list[msgspec.Raw])[step]
            around.append({})
        else:
            beside = msgspec.json.decode(inner, type=dict[str, msgspec.Raw])
            inner = beside[step]
            short = len(beside) <= MAX_SHORT_VALUES
            around.append({k: v for k, v in beside.items() if short and len(v) <= MAX_SHOWN_CHARS})
    members = list(msgspec.json.decode(inner, type=dict[str, msgspec.Raw]).items())
    same = _PLACE.sub("[0]", text)

    def fails(count: int) -> bool:
        value: Any = dict(members[:count])
        for step, beside in zip(reversed(steps), reversed(around), strict=True):
            value = [value] if isinstance(step, int) else {**beside, step: value}
        try:
            decoder.decode(msgspec.json.encode(value))
        except msgspec.ValidationError as error:
            return str(error) == same
        return False

    place = bisect_left(range(1, len(members) + 1), True, key=fails)
    return members[place][0] if place < len(members) else None


def check_depth(value: Any, param: str) -> None:
    """Raise InvalidRequest if `value` is nested too deeply or has too many values.

    The check is iterative, so deep nesting cannot exhaust the stack.
    """
    level, count = [value], 0
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        count += len(level)
        if not level:
            return
        if count > MAX_VALUES:
            raise InvalidRequest(f"{param}: more than {MAX_VALUES:,} values", param=param)
    raise InvalidRequest(f"{param}: nested deeper than {MAX_DEPTH} levels", param=param)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def has_field(data: bytes, name: str) -> bool:
    """Return whether the body has this top-level field, if two kinds of body share a route."""
    return name in decode(data, _top_level)


def unknown_fields(data: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Return the top-level fields that `kind` does not have. They are accepted and have no effect.

    Only names that are safe in a header are returned, at most MAX_LISTED_FIELDS. Raises
    InvalidRequest for a name that is not valid UTF-8, which decoding a struct does not notice.
    """
    known = _field_names(kind)
    names = [name for name in decode(data, _top_level) if name not in known]
    return [name for name in names if _FIELD_NAME.fullmatch(name)][:MAX_LISTED_FIELDS]


@cache
def _field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the field names in JSON. Cached: this is slower than decoding a request."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))
