"""The keywords of a request's JSON Schema: which are enforced, which have no meaning for a grammar,
and which are refused by name and path.

A path is the place of a keyword in the request:
"response_format.json_schema.schema.properties.age.minimum".
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
"""Keywords of JSON Schema that would change the answer, and that no grammar of ours can enforce."""
SILENT = ANNOTATIONS | {"id", "$vocabulary", "contentSchema", "xml", "externalDocs"}
"""Keywords that do not affect which values are valid."""


MAX_UNKNOWN = 16
"""The most paths of unknown keywords that are reported."""
MAX_SEGMENT_CHARS = 100
"""A longer name is truncated in a path."""


class _Place(msgspec.Struct, frozen=True):
    """A keyword and the place of its schema. The path is composed only when it is reported."""

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
    unknown keyword is refused, too."""
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
    """Return the paths of unknown keywords, which have no effect; at most MAX_UNKNOWN."""
    found = ((parent, keyword) for parent, keyword in _keywords(schema, at) if _is_unknown(keyword))
    return [_path(parent, keyword) for parent, keyword in islice(found, MAX_UNKNOWN)]


def _path(parent: _Place, keyword: str) -> str:
    return str(_Place(parent, f".{keyword}"))


def _is_unknown(keyword: str) -> bool:
    known = keyword in ENFORCED or keyword in UNENFORCEABLE or keyword in SILENT
    return not known and not keyword.startswith("x-")


def _keywords(schema: Any, at: str) -> Iterator[tuple[_Place, str]]:
    """Yield every keyword of a schema and its inner schemas, after the place of that schema. The
    engine refuses schemas of the wrong shape."""
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
