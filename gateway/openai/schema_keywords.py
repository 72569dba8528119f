"""The keywords of a JSON Schema that a request brings: which are enforced, which mean nothing to a
grammar, and which are refused by name and place.

A path says where a keyword stands in the request:
"response_format.json_schema.schema.properties.age.minimum".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from gateway.output.grammar.cases import ANNOTATIONS
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
"""Keywords of JSON Schema that would change the answer, and that no grammar of ours can enforce."""
SILENT = ANNOTATIONS | {"id", "$vocabulary", "contentSchema", "xml", "externalDocs"}
"""Keywords that say nothing about what is valid."""


MAX_UNKNOWN = 16
"""Paths of unknown keywords that are told; more are not looked for."""
MAX_SEGMENT_CHARS = 100
"""A longer name is cut in a path."""


class _Place(msgspec.Struct, frozen=True):
    """A keyword, and where its schema stands; a path is written only when it is told."""

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
    """Raise InvalidRequest naming the path of a keyword that cannot be enforced. With `strict` an
    unknown keyword is one, too."""
    for parent, keyword in _keywords(schema, at):
        if keyword in UNENFORCEABLE:
            path = _path(parent, keyword)
            raise InvalidRequest(f"{path}: {keyword!r} cannot be enforced", param=path)
        if strict and _is_unknown(keyword):
            path = _path(parent, keyword)
            raise InvalidRequest(
                f"{path}: this is not a known keyword of JSON Schema, so it cannot be enforced, as "
                "strict demands",
                param=path,
            )


def unknown_keywords(schema: Any, at: str) -> list[str]:
    """The paths of keywords that have no effect because nobody knows them; not all, if there are
    many."""
    found = ((parent, keyword) for parent, keyword in _keywords(schema, at) if _is_unknown(keyword))
    return [_path(parent, keyword) for parent, keyword in islice(found, MAX_UNKNOWN)]


def _path(parent: _Place, keyword: str) -> str:
    return str(_Place(parent, f".{keyword}"))


def _is_unknown(keyword: str) -> bool:
    known = keyword in ENFORCED or keyword in UNENFORCEABLE or keyword in SILENT
    return not known and not keyword.startswith("x-")


def _keywords(schema: Any, at: str) -> Iterator[tuple[_Place, str]]:
    """Every keyword of a schema and the schemas in it, behind where its schema stands. What has the
    wrong shape is left to the engine, which refuses it."""
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
