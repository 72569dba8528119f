"""Finds the literals of a JSON Schema: texts that an answer may have to contain.

They are the strings in `const`, `enum` and `required`, patterns, and the names of properties.
Descriptions, titles, examples and defaults are not literals, so they may have any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from protocol.engine.grammar import MAX_LITERAL_CHARS
from protocol.wire.errors import InvalidRequest

MAX_SEGMENT_CHARS = 100
"""Names longer than this are truncated in a path."""
_VALUES = frozenset(("const", "enum", "required", "pattern"))
"""Keywords in whose value each string is a literal."""
_SCHEMAS_BY_LITERAL = frozenset(
    ("properties", "patternProperties", "dependentRequired", "dependentSchemas")
)
"""Keywords whose value maps literals to schemas."""
_SCHEMAS_BY_NAME = frozenset(("$defs", "definitions"))
"""Keywords whose value maps names, which are not literals, to schemas."""


class SchemaPlace(msgspec.Struct, frozen=True):
    """A segment of a path, linked to its parent. The path is built only when it is reported."""

    parent: SchemaPlace | None
    segment: str

    def __str__(self) -> str:
        segments = []
        place: SchemaPlace | None = self
        while place is not None:
            segments.append(place.segment[:MAX_SEGMENT_CHARS])
            place = place.parent
        return "".join(reversed(segments))


def check_literals(schema: Any, at: str) -> None:
    """Raise InvalidRequest, with its path, for the first literal that is longer than
    MAX_LITERAL_CHARS. `at` is the path of `schema`."""
    for place, text in _literals(schema, SchemaPlace(None, at)):
        if len(text) > MAX_LITERAL_CHARS:
            raise InvalidRequest.at(
                str(place),
                f"a value, pattern or property name of {len(text):,} characters; the limit is "
                f"{MAX_LITERAL_CHARS:,}",
            )


def _literals(schema: Any, at: SchemaPlace) -> Iterator[tuple[SchemaPlace, str]]:
    """Yield each literal and its place. The place of a property name is that of its parent."""
    waiting = [(at, schema, False)]  # the last says whether the value consists of literals
    while waiting:
        place, value, is_literal = waiting.pop()
        match value:
            case str() if is_literal:
                yield place, value
            case list():
                inner = ((SchemaPlace(place, f"[{n}]"), one) for n, one in enumerate(value))
                waiting += [(at, one, is_literal) for at, one in inner]
            case Mapping() if is_literal:
                for name, one in value.items():
                    yield place, name
                    waiting.append((SchemaPlace(place, f".{name}"), one, True))
            case Mapping():
                for keyword, one in value.items():
                    below = SchemaPlace(place, f".{keyword}")
                    maps = keyword in _SCHEMAS_BY_LITERAL or keyword in _SCHEMAS_BY_NAME
                    if not (maps and isinstance(one, Mapping)):
                        waiting.append((below, one, keyword in _VALUES))
                        continue
                    for name, each in one.items():
                        if keyword in _SCHEMAS_BY_LITERAL:
                            yield below, name
                        waiting.append((SchemaPlace(below, f".{name}"), each, False))
