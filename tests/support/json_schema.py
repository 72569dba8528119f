"""An independent JSON Schema validator, written from the definitions of the keywords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KINDS = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "integer": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v == int(v),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
BOUNDS = {
    "minimum": lambda v, limit: v >= limit,
    "maximum": lambda v, limit: v <= limit,
    "exclusiveMinimum": lambda v, limit: v > limit,
    "exclusiveMaximum": lambda v, limit: v < limit,
}
SIZES = {
    "minLength": (str, lambda n, limit: n >= limit),
    "maxLength": (str, lambda n, limit: n <= limit),
    "minItems": (list, lambda n, limit: n >= limit),
    "maxItems": (list, lambda n, limit: n <= limit),
    "minProperties": (dict, lambda n, limit: n >= limit),
    "maxProperties": (dict, lambda n, limit: n <= limit),
}


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    return all(_keyword(value, key, schema, root) for key in schema)


def same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _keyword(value: Any, key: str, schema: Mapping[str, Any], root: Any) -> bool:
    limit = schema[key]
    match key:
        case "type":
            kinds = limit if isinstance(limit, list) else [limit]
            return any(KINDS[kind](value) for kind in kinds)
        case "enum":
            return any(same(value, one) for one in limit)
        case "const":
            return same(value, limit)
        case "anyOf":
            return any(fits(value, one, root) for one in limit)
        case "oneOf":
            return sum(fits(value, one, root) for one in limit) == 1
        case "allOf":
            return all(fits(value, one, root) for one in limit)
        case "$ref":
            at = root
            for part in limit.split("/")[1:]:
                at = at[part]
            return fits(value, at, root)
        case "pattern":
            return not isinstance(value, str) or re.search(limit, value) is not None
        case "$defs":
            return True
    if key in BOUNDS:
        return not KINDS["number"](value) or BOUNDS[key](value, limit)
    if key in SIZES:
        kind, compare = SIZES[key]
        return not isinstance(value, kind) or compare(len(value), limit)
    if isinstance(value, list):
        return key != "items" or all(fits(item, limit, root) for item in value)
    return not isinstance(value, dict) or _member(value, key, schema, root)


def _member(value: dict[str, Any], key: str, schema: Mapping[str, Any], root: Any) -> bool:
    limit = schema[key]
    match key:
        case "properties":
            return all(fits(value[name], limit[name], root) for name in limit if name in value)
        case "required":
            return all(name in value for name in limit)
        case "additionalProperties":
            others = value.keys() - schema.get("properties", {}).keys()
            return all(fits(value[name], limit, root) for name in others)
        case "items":
            return True
    raise AssertionError(f"this validator has no keyword {key}")
