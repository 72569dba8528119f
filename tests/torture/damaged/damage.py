"""Damages bytes and JSON texts at random places."""

from __future__ import annotations

import json
from random import Random
from typing import Any

DEEP = 100_000
ODD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\x00", "\ud800", "x" * 10_000, "../../etc/passwd"),
    *(0, 1, -1, 2, 7, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 200, -(1 << 63)),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *([], {}, [[]], [None], ["x", 1], [-1, -1], {"type": "x"}, {"": None}, [1] * 1_000),
)
"""Values that are unusual or invalid for most fields."""
DEEP_TEXTS = ("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "9" * 5_000, "1e999")
"""JSON texts that `json.dumps` cannot write: deep nesting, and numbers out of range."""
PLACE = '"the place of another text"'
NUMBERS = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)


def damaged_bytes(data: bytes, random: Random, start: int = 0, end: int | None = None) -> bytes:
    """Return `data` with one kind of damage, which begins between `start` and `end`."""
    end = len(data) if end is None else end
    at = random.randrange(start, max(end, start + 1))
    size = random.choice((1, 2, 4, 8, 64, 1_000))
    match random.randrange(7):
        case 0:
            changed = bytearray(data)
            for _ in range(random.choice((1, 1, 2, 8))):
                changed[random.randrange(start, max(end, start + 1))] ^= 1 << random.randrange(8)
            return bytes(changed)
        case 1:
            return data[:at]
        case 2:
            return data[:at] + random.randbytes(size) + data[at:]
        case 3:
            return data[:at] + data[at + size :]
        case 4:
            return data[: at + size] + data[at:]
        case 5:
            return (
                data[:at] + random.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80")) + data[at:]
            )
        case _:
            number = random.choice(NUMBERS).to_bytes(8, "little")[: random.choice((4, 8))]
            return data[:at] + number + data[at + len(number) :]


def damaged_json(text: bytes, random: Random) -> bytes:
    """Return `text`, a JSON object, with one damaged entry: it is removed, its key occurs twice, or
    its value is one of ODD or DEEP_TEXTS."""
    root = json.loads(text)
    parent, key = _place(root, random)
    kind = random.randrange(6)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        parent[key] = PLACE[1:-1]
        return json.dumps(root).replace(PLACE, random.choice(DEEP_TEXTS), 1).encode()
    elif kind == 2 and isinstance(key, str):
        value = parent[key]
        parent[key] = PLACE[1:-1]
        doubled = f"{json.dumps(random.choice(ODD))}, {json.dumps(key)}: {json.dumps(value)}"
        return json.dumps(root).replace(PLACE, doubled, 1).encode()
    else:
        parent[key] = random.choice(ODD)
    return json.dumps(root).encode()


def _place(root: Any, random: Random) -> tuple[Any, Any]:
    """Return a container in `root`, and one of its keys or indices."""
    at = root
    while True:
        key = random.choice(list(at)) if isinstance(at, dict) else random.randrange(len(at))
        inner = at[key]
        if not isinstance(inner, dict | list) or not inner or random.random() < 0.3:
            return at, key
        at = inner
