"""Bounds on the contents of a JSON text. They are checked while it arrives, before it is decoded.

A megabyte of `1,1,1,` or `[],[],` becomes half a million objects, and decoding it delays every
other request of the process. So strings, containers (objects and arrays) and values are counted
first, with a few calls of C functions for each piece of the text. A body is refused as soon as it
exceeds a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from protocol.wire.errors import InvalidRequest

MAX_STRINGS = 1 << 16
"""Maximum number of strings (keys included), and also of containers. Decoding 65,536 of each takes
20 ms."""
MAX_VALUES = 200_000
"""Maximum number of values besides a prompt's token ids. Decoding 200,000 takes about 10 ms."""
MAX_TOKEN_IDS = 1 << 20
"""Maximum number of token ids in one body, for any context length and number of prompts."""
_MAX_WALK = 4096
"""Maximum number of strings that are examined to find the field that exceeds a bound."""
_RUN = 256
"""Number of consecutive strings that are skipped together if no container starts or ends there."""
_BRACKETS = re.compile(rb"[\[\]{}]")
_KEY_NAME = re.compile(rb"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """The limits on the contents of one body."""

    #: Maximum number of strings, keys included. The number of containers has the same bound.
    max_strings: int = MAX_STRINGS
    #: Maximum number of values.
    max_values: int = MAX_VALUES

    @classmethod
    def with_ids(cls, num_ids: int) -> JsonBounds:
        """Return the limits for a body that may also contain `num_ids` token ids."""
        return cls(max_values=MAX_VALUES + min(num_ids, MAX_TOKEN_IDS))


USUAL_BOUNDS = JsonBounds()


class JsonCounter:
    """Counts the contents of a JSON text that arrives in pieces. The text may be malformed."""

    def __init__(self, bounds: JsonBounds) -> None:
        self._bounds = bounds
        self._escape = b""  # a backslash that ended the last piece
        self._is_inside = False  # whether the last piece ended inside a string
        self._num_quotes = 0
        self._num_containers = 0
        self._num_values = 1

    def push(self, piece: bytes) -> str:
        """Count the contents of `piece`. Return a phrase that names the exceeded bound, or ""."""
        parts, self._escape = _parts(self._escape + piece)
        outside = b"".join(parts[self._is_inside :: 2])
        self._is_inside ^= len(parts) % 2 == 0
        self._num_quotes += len(parts) - 1
        self._num_containers += outside.count(b"[") + outside.count(b"{")
        self._num_values += outside.count(b",")
        bounds = self._bounds
        if self._num_quotes > 2 * bounds.max_strings:
            return f"more than {bounds.max_strings:,} strings"
        if self._num_containers > bounds.max_strings:
            return f"more than {bounds.max_strings:,} objects and arrays"
        if self._num_values > bounds.max_values:
            return f"more than {bounds.max_values:,} values"
        return ""


def too_much(text: bytes, excess: str) -> InvalidRequest:
    """Return the error for a body that exceeds a bound.

    text    the body up to the place where it exceeds the bound
    excess  the phrase that `JsonCounter.push` returned

    The error names the field, unless `text` has so many strings that finding the field is slow.
    """
    field = open_field(text) if text.count(b'"') <= 3 * MAX_STRINGS else None
    if field is None:
        return InvalidRequest(f"the body has {excess}")
    return InvalidRequest(f"{field}: {excess}", param=field)


def open_field(text: bytes) -> str | None:
    """Return the path of the field in which `text`, the start of a JSON text, ends.

    The path consists of keys, from the outermost object down to the first field that is not an
    object. The result is None if the text ends outside a field, or if a key in the path is not safe
    to show. The search goes backwards from the end, along the keys of the objects that are open.
    """
    parts, _ = _parts(text)
    is_inside = len(parts) % 2 == 0
    last = len(parts) - 1 - is_inside
    depth = least = _net_depth(b"".join(parts[0 : last + 1 : 2]))
    path: list[bytes] = []
    for place in _places_before(parts, last):
        depth -= _net_depth(parts[place])
        value = parts[place].lstrip()
        if depth < least and value.startswith(b":"):
            path = [parts[place - 1], *(path if value[1:].lstrip().startswith(b"{") else ())]
            least = depth
        if least == 1:
            break
    if least > 1 or not path or not all(map(_KEY_NAME.fullmatch, path)):
        return None
    return b".".join(path).decode()


def _places_before(parts: list[bytes], last: int) -> Iterator[int]:
    """Yield the indexes, from `last` backwards, of the parts that are outside strings.

    Long runs of parts in which no container starts or ends are skipped: no part of such a run
    follows the key of an object that is still open. At most _MAX_WALK indexes are yielded.
    """
    num_left = _MAX_WALK
    for end in range(last, 0, -2 * _RUN):
        run = range(end, max(end - 2 * _RUN, 0), -2)
        if end != last and not _BRACKETS.search(b"".join(parts[run[-1] : end + 1 : 2])):
            continue
        num_left -= len(run)
        if num_left < 0:
            return
        yield from run


def _parts(text: bytes) -> tuple[list[bytes], bytes]:
    """Return `text` without escapes, split at the quotes that start and end strings.

    Even indexes are outside strings, odd ones inside. The second result is a backslash if `text`
    ends with one, because its escape is not complete; otherwise it is empty.
    """
    text = text.replace(b"\\\\", b"")
    end = b"\\" if text.endswith(b"\\") else b""
    return text.removesuffix(end).replace(b'\\"', b"").split(b'"'), end


def _net_depth(outside: bytes) -> int:
    """Return how many more containers start than end in text that is outside strings."""
    opened = outside.count(b"[") + outside.count(b"{")
    return opened - outside.count(b"]") - outside.count(b"}")
