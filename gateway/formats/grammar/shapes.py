"""The shapes of a JSON Schema's keywords: a tool's schema comes from outside, unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
SHAPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(COUNTS, (int,)),
    **dict.fromkeys(NUMERIC, (int, float)),
    **dict.fromkeys(("pattern", "format", "$ref"), (str,)),
    **dict.fromkeys(("enum", "required", "prefixItems", "allOf", "anyOf", "oneOf"), (list,)),
    **dict.fromkeys(("items", "additionalProperties"), (Mapping, bool)),
    "properties": (Mapping,),
    "type": (str, list),
}
"""Keyword -> what its value must be."""


def shape_fault(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """(keyword, what is wrong with its value)."""
    for key, value in schema.items():
        shape = SHAPES.get(key)
        if shape is None:
            continue
        fits = isinstance(value, shape) and (bool in shape or type(value) is not bool)
        if not fits:
            return key, f"cannot be {value!r}"
        if key in COUNTS and value < 0:
            return key, "cannot be negative"
        if key in ("type", "required") and not all(isinstance(each, str) for each in value):
            return key, "must name strings"
    return None
