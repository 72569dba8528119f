"""Small random changes of values. Pure: the random generator is an argument.

A value is anything that MessagePack or JSON can encode: None, booleans, numbers, strings, bytes,
lists, maps and MessagePack's extension values.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

Path = tuple[Any, ...]

NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 127, 128, 255, 256, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1),
    *(2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, 3.0),
]
STRINGS = ["", "\0", "a", "x" * 300, "\ud7ff", "é" * 40, "💥", "../../etc", "{{ 1 }}", "%s%n", "-1"]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], {"": {}}, [None], {"kind": "ping"}]
DEEP, MANY = 60, 400


def changed(value: Any, chance: Random) -> Any:
    """Return a copy of `value` with a change in one place."""
    path = chance.choice(_paths(value))
    return _replaced(value, path, lambda old: _another(old, chance))


def _paths(value: Any, path: Path = ()) -> list[Path]:
    """Return the path of `value` itself and of the values inside it. Of a list, only the first 20
    values count."""
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:20]):
            found += _paths(inner, (*path, index))
    return found


def _replaced(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], change)
    return copy


def _another(old: Any, chance: Random) -> Any:
    """Return another value, of the same type or of another one."""
    if chance.random() < 0.25:
        return chance.choice([*NUMBERS, *STRINGS, *OTHERS])
    match old:
        case bool() | None:
            return chance.choice([True, False, None, 0, "true"])
        case int():
            return chance.choice([*NUMBERS, old + 1, old - 1, -old, old * 1000, str(old)])
        case float():
            return chance.choice([*NUMBERS, -old, old * 1e6, str(old)])
        case str():
            return _another_string(old, chance)
        case bytes():
            return damaged(old, chance)
        case list():
            return _another_list(old, chance)
        case dict():
            return _another_map(old, chance)
        case msgpack.ExtType():
            return msgpack.ExtType(
                chance.choice([old.code, 1, 2, 3, 127]), damaged(old.data, chance)
            )
    raise TypeError(type(old).__name__)


def _another_string(old: str, chance: Random) -> str:
    cut = chance.randrange(len(old) + 1)
    return chance.choice(
        [old[:cut], old[cut:], old * 2, old + chance.choice(STRINGS), old.upper(), old[::-1]]
    )


def _another_list(old: list[Any], chance: Random) -> Any:
    match chance.randrange(6):
        case 0:
            return old * chance.choice([2, 3, MANY])
        case 1:
            return old[: chance.randrange(len(old) + 1)]
        case 2:
            return [*old, chance.choice([*NUMBERS, *STRINGS, *OTHERS])]
        case 3:
            return old[::-1]
        case 4:
            return _nested(old, chance)
    return {str(index): inner for index, inner in enumerate(old)}


def _another_map(old: dict[Any, Any], chance: Random) -> Any:
    keys = list(old)
    match chance.randrange(6):
        case 0 if keys:
            gone = chance.choice(keys)
            return {key: inner for key, inner in old.items() if key != gone}
        case 1:
            return {**old, chance.choice(STRINGS): chance.choice([*NUMBERS, *OTHERS])}
        case 2 if len(keys) > 1:
            one, other = chance.sample(keys, 2)
            return {**old, one: old[other], other: old[one]}
        case 3 if keys:
            key = chance.choice(keys)
            return {**old, key: changed(old[key], chance)}
        case 4:
            return _nested(old, chance)
    return list(old.values())


def _nested(old: Any, chance: Random) -> Any:
    for _ in range(chance.choice([1, 2, DEEP])):
        old = [old]
    return old


def damaged(data: bytes, chance: Random) -> bytes:
    """Return the bytes with changes in one to five places."""
    result = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = chance.randrange(len(result) + 1)
        end = min(len(result), at + chance.choice([1, 1, 2, 4, 16]))
        match chance.randrange(6):
            case 0:
                result[at:end] = b""
            case 1:
                result[at:at] = chance.randbytes(chance.choice([1, 2, 4, 40]))
            case 2:
                result[at:end] = chance.randbytes(end - at)
            case 3 if at < len(result):
                result[at] ^= 1 << chance.randrange(8)
            case 4:
                result[at:at] = result[at:end] * chance.choice([1, 3])
            case 5:
                del result[at:]
    return bytes(result)
