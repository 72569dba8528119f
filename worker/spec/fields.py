"""Reads typed values from an untrusted mapping. Errors name the file and the field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worker.errors import FETCH_AGAIN, UnusableModel

_REQUIRED: Any = object()
MAX_INTEGER = (1 << 63) - 1
MIN_FLOAT32, MAX_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest normal number above zero and the largest number of float32. No model computes in a
wider type."""


class Fields:
    """A mapping whose values are checked when they are read.

    A field that is null reads like a missing field, except that `in` finds it. Reading a field that
    is missing and has no default, or that has the wrong type, raises UnusableModel, which names the
    field. `get` checks nothing. The constructor raises UnusableModel if `values` is not a mapping.

    source   name of the mapping in error messages
    """

    def __init__(self, values: Any, source: str) -> None:
        if not hasattr(values, "get"):
            raise UnusableModel(f"{source} is not an object")
        self._values = values
        self._source = source

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def values(self) -> Iterable[Any]:
        """Return all values, including those of fields that are not read."""
        values: Iterable[Any] = self._values.values()
        return values

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int = _REQUIRED) -> int:
        value = self._found(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INTEGER:
            raise self._wrong(name, value, "an integer of 64 bits")
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """Return a finite number within the range of float32."""
        value = self._found(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
            raise self._wrong(name, value, "a finite number of float32")
        return float(value)

    def positive(self, name: str, default: float = _REQUIRED) -> float:
        """Return a number of at least MIN_FLOAT32, so that float32 can hold its inverse too."""
        value = self.number(name, default)
        if value < MIN_FLOAT32:
            raise self._wrong(name, value, "above zero")
        return value

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        value = self._found(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = _REQUIRED) -> str:
        value = self._found(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def _found(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is _REQUIRED and name in self:
            raise UnusableModel(f"{self._source}: {name!r} is null")
        if value is _REQUIRED:
            raise UnusableModel(f"{self._source} has no {name!r}")
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> UnusableModel:
        return UnusableModel(f"{self._source}: {name!r} is {value!r:.80}, not {wanted}")


def parsed_json(data: bytes, *, is_strict: bool = False) -> Any:
    """Return the value of a JSON text in UTF-8.

    is_strict   raise ValueError also if an object has a key twice, and for NaN and Infinity. Python
                would read these; other libraries that read the same file refuse them.

    Raises ValueError or RecursionError if the text cannot be parsed. Half of a surrogate pair also
    raises ValueError: Python would read it, but the string could not be encoded as UTF-8 later.
    """
    text = data.decode("utf-8-sig")
    if is_strict:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    else:
        value = json.loads(text)
    if b"\\ud" in data or b"\\uD" in data:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UnusableModel if the file cannot be read, or has
    no JSON object."""
    try:
        value = parsed_json(path.read_bytes())
    except OSError as error:
        raise UnusableModel(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableModel(f"{path} is not valid JSON: {error}", remedy=FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise UnusableModel(f"{path} is not a JSON object")
    return value
