"""Checks the keywords of a JSON Schema in a request.

A keyword is enforced, ignored because it does not affect validity, unknown, or refused with its
path in the request: "response_format.json_schema.schema.properties.age.minimum".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from gateway.formats.schema_cases import ANNOTATIONS
from protocol.errors import InvalidRequest

_ONE = ("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
        "unevaluatedProperties", "additionalProperties", "additionalItems", "items")  # fmt: skip
"""Keywords whose value is a schema. `items` may also be a list of them, in old drafts."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value maps names to schemas."""

ENFORCED = frozenset(
    ("type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "minLength", "maxLength", "pattern", "format", "items", "prefixItems",
     "additionalItems", "minItems", "maxItems", "properties", "patternProperties",
     "additionalProperties", "required", "minProperties", "maxProperties", "allOf", "anyOf",
     "oneOf", "$ref")
)  # fmt: skip
UNENFORCEABLE = frozenset(
    ("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
     "dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "unevaluatedItems",
     "unevaluatedProperties", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
     "$recursiveAnchor")
)  # fmt: skip
"""Keywords that would restrict the answer, but cannot be expressed in our grammars."""
SILENT = ANNOTATIONS | {"id", "$vocabulary", "contentSchema", "xml", "externalDocs"}
"""Keywords that do not affect which values are valid."""


MAX_UNKNOWN = 16
"""Limit on the unknown keywords that a response lists."""
MAX_SEGMENT_CHARS = 100
"""Longer names are truncated in a path."""


class _Place(msgspec.Struct, frozen=True):
    """A segment of a path, linked to its parent. The path is built only when it is reported."""

    parent: _Place | None
    segment: str

    def __str__(self) -> str:
        segments = []
        place: _Place | None = self
        while place is not None:
            segments.append(place.segment[:MAX_SEGMENT_CHARS])
            place = place.parent
        return "".join(reversed(segments))


def check_keywords(schema: Any, at: str, *, strict: bool) -> None:
    """Raise InvalidRequest for the first keyword that cannot be enforced.

    at      the path of `schema` in the request
    strict  also refuse unknown keywords
    """
    for parent, keyword in _keywords(schema, at):
        if keyword in UNENFORCEABLE:
            path = _path(parent, keyword)
            raise InvalidRequest(
                f"{path}: this server cannot enforce the keyword {keyword!r}", param=path
            )
        if strict and _is_unknown(keyword):
            path = _path(parent, keyword)
            raise InvalidRequest(
                f"{path}: {keyword!r} is not a JSON Schema keyword, so strict cannot enforce it",
                param=path,
            )


def unknown_keywords(schema: Any, at: str) -> list[str]:
    """Return the paths of at most MAX_UNKNOWN unknown keywords. They have no effect."""
    found = ((parent, keyword) for parent, keyword in _keywords(schema, at) if _is_unknown(keyword))
    return [_path(parent, keyword) for parent, keyword in islice(found, MAX_UNKNOWN)]


def _path(parent: _Place, keyword: str) -> str:
    return str(_Place(parent, f".{keyword}"))


def _is_unknown(keyword: str) -> bool:
    known = keyword in ENFORCED or keyword in UNENFORCEABLE or keyword in SILENT
    return not known and not keyword.startswith("x-")


def _keywords(schema: Any, at: str) -> Iterator[tuple[_Place, str]]:
    """Yield (place of the schema, keyword) for the schema and all schemas inside it.

    Malformed schemas are skipped here; the engine refuses them.
    """
    waiting = [(schema, _Place(None, at))]
    while waiting:
        schema, place = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        for keyword, value in schema.items():
            yield place, keyword
            if keyword in _MAPS and isinstance(value, Mapping):
                inner = _Place(place, f".{keyword}")
                waiting += [(one, _Place(inner, f".{name}")) for name, one in value.items()]
            elif keyword in _LISTS and isinstance(value, list):
                inner = _Place(place, f".{keyword}")
                waiting += [(one, _Place(inner, f"[{n}]")) for n, one in enumerate(value)]
            elif keyword in _ONE:
                waiting.append((value, _Place(place, f".{keyword}")))
