"""The keywords of a JSON Schema that a request brings: which are enforced, which mean nothing to a
grammar, and which are refused by name and place.

A path says where a keyword stands in the request:
"response_format.json_schema.schema.properties.age.minimum".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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


def check_keywords(schema: Any, at: str, *, strict: bool) -> None:
    """Raise InvalidRequest naming the path of a keyword that cannot be enforced. With `strict` an
    unknown keyword is one, too."""
    for path, keyword in _keywords(schema, at):
        if keyword in UNENFORCEABLE:
            raise InvalidRequest(f"{path}: {keyword!r} cannot be enforced", param=path)
        if strict and _is_unknown(keyword):
            raise InvalidRequest(
                f"{path}: {keyword!r} is not a known keyword of JSON Schema, so it cannot be "
                "enforced, as strict demands",
                param=path,
            )


def unknown_keywords(schema: Any, at: str) -> list[str]:
    """The paths of keywords that have no effect because nobody knows them."""
    return [path for path, keyword in _keywords(schema, at) if _is_unknown(keyword)]


def _is_unknown(keyword: str) -> bool:
    known = keyword in ENFORCED or keyword in UNENFORCEABLE or keyword in SILENT
    return not known and not keyword.startswith("x-")


def _keywords(schema: Any, at: str) -> Iterator[tuple[str, str]]:
    """Every (path, keyword) of a schema and the schemas in it. What has the wrong shape is left to
    the engine, which refuses it."""
    waiting = [(schema, at)]
    while waiting:
        schema, at = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        for keyword, value in schema.items():
            path = f"{at}.{keyword}"
            yield path, keyword
            if keyword in _MAPS and isinstance(value, Mapping):
                waiting += [(inner, f"{path}.{name}") for name, inner in value.items()]
            elif keyword in _LISTS and isinstance(value, list):
                waiting += [(inner, f"{path}[{n}]") for n, inner in enumerate(value)]
            elif keyword in _ONE:
                waiting.append((value, path))
