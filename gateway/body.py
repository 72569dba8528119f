"""Request bytes -> a checked struct. Whatever is wrong is said here, with the field's name.

Sizes are checked before anything is read, types and bounds while decoding (msgspec), nesting after
it. Nothing here knows what a field means.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import gevent
import msgspec
from flask import Request
from werkzeug.exceptions import (
    ClientDisconnected,
    RequestEntityTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)

from protocol.errors import InvalidRequest

MAX_DEPTH = 64
"""Levels of objects and arrays in what a request may hold freely (tools, template arguments)."""
MAX_VALUES = 200_000
"""Values inside it, on all levels."""
MAX_STRINGS = 65_536
"""Keys and texts in a body. What decodes so slowly that others would have to wait, has more: 10 MB
of keys of two letters take a quarter of a second, and are known after the first of these."""
MAX_LISTED_FIELDS = 16
MAX_SHOWN_CHARS = 64
"""Of a key of the request, in an error."""
MAX_SHORT_VALUES = 256
BODY_S = 60
_PIECE_BYTES = 1 << 17

T = TypeVar("T")
_WHERE = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_PLACE = re.compile(r"\[\d+\]")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_ANY_KEY = "[...]"
"""A key of a mapping, in msgspec's paths."""
_MISSING = re.compile(r"missing required field `([^`]+)`")
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_json(request: Request, max_bytes: int, max_strings: int = MAX_STRINGS) -> bytes:
    """The body of a JSON request. A request without a content type is taken to be JSON.

    Raises 413 when it is longer than `max_bytes`, 415 when it says that it is something else, 408
    when it takes longer than BODY_S: who trickles it must not keep a connection.
    """
    if request.mimetype and not request.is_json:
        raise UnsupportedMediaType(f"the body must be application/json, not {request.mimetype}")
    too_large = RequestEntityTooLarge(f"the body is larger than {max_bytes:,} bytes")
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large
    try:
        with gevent.Timeout(BODY_S, RequestTimeout(f"the body took longer than {BODY_S} s")):
            data = request.stream.read(max_bytes + 1)
    except ClientDisconnected:
        raise InvalidRequest("the body ended before its announced length") from None
    if len(data) > max_bytes:
        raise too_large
    check_strings(data, max_strings)
    return bytes(data)


def check_strings(data: bytes, most: int) -> None:
    """Raises InvalidRequest where JSON has more strings than so many; at the latest than twice.

    Each has two quotes, and quotes within are escaped; those whose last letter is a backslash are
    counted half. 3 ms for 1 MB.
    """
    num_quotes = 0
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        num_quotes += piece.count(b'"') - piece.count(b'\\"')
        if num_quotes > 2 * most:
            raise InvalidRequest(f"the body has more than {most:,} strings")


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises InvalidRequest; `param` is the path of the field at fault, where it is known."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), data, decoder) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is no valid JSON: {error}") from None


def _invalid_field(text: str, data: bytes, decoder: msgspec.json.Decoder[Any]) -> InvalidRequest:
    """From msgspec's words, which end in the path: "Expected `int` >= 1 - at `$.n`"."""
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
        except (ValueError, LookupError, RecursionError):  # no JSON after this, or a name twice
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
    """Return the key of the mapping at `path` that `decoder` complains about; None: not found.

    msgspec does not say which it is. So the mapping is decoded again with fewer of its members,
    until the first is found with which the error is the same. Of what surrounds it only short
    values are decoded again: they may say of what type it is.
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
    """Raises InvalidRequest where `value` is nested too deeply or holds too much.

    Needs no stack of its own.
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
    """Whether the body's object has it: where two kinds of body share a route."""
    return name in decode(data, _top_level)


def unknown_fields(data: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Names of top-level fields that `kind` does not have: accepted, without effect, and listed.

    Only names that are safe in a header, and not more than MAX_LISTED_FIELDS of them. Raises
    InvalidRequest where a name is no text, which decoding a struct does not notice.
    """
    known = _fields_of(kind)
    names = [name for name in decode(data, _top_level) if name not in known]
    return [name for name in names if _FIELD_NAME.fullmatch(name)][:MAX_LISTED_FIELDS]


@cache
def _fields_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    """As JSON calls them. To find out takes longer than all else about a request."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))
