"""Checks of decoded JSON values whose fields have no schema. Errors name the path of the value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from protocol.wire.errors import InvalidRequest

MAX_DEPTH = 64
"""Maximum nesting of objects and arrays in a field without a schema (tools, template arguments)."""
MAX_VALUES = 200_000
"""Maximum number of values in a field without a schema, on all its levels."""


def as_object(value: Any, at: str) -> Mapping[str, Any]:
    """Return a JSON object unchanged. Raise InvalidRequest naming the path `at` if `value` is not
    an object."""
    if not isinstance(value, Mapping):
        raise InvalidRequest.wrong(at, "an object", value)
    return value


def check_depth(value: Any, param: str) -> None:
    """Raise InvalidRequest if `value` is nested too deeply or has too many values. The check is
    iterative, so deep nesting cannot exhaust the stack."""
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
