"""Rewrites a JSON Schema as cases. Each case is one type with its limits, without combinators.

`type` (one or a list), `enum`, `const`, `nullable`, `anyOf`, `oneOf`, `allOf` and local `$ref`s are
resolved here. The keywords left in a case limit its one type. `oneOf` is handled like `anyOf`, so
it is refused unless its options certainly exclude each other. An empty schema admits every type.

The cases may be narrower than the schema, but never wider. A schema that cannot be expressed in
this way is refused: NotWritable names the keyword. Only annotations are ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from gateway.formats.argument_types import MAX_REFS, ORDER
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar_builder import NotWritable
from protocol.wire.field_words import one_of

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
"""Keyword -> Python types of its value, to check the schemas that clients send."""

MAX_CASES = 256
"""Most cases of one value. Nested options multiply."""

ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "$comment", "$id", "$schema", "$defs", "definitions", "$anchor",
     "contentEncoding", "contentMediaType", "discriminator")
)  # fmt: skip

LIMITS: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": NUMERIC,
    "integer": NUMERIC,
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "boolean": (),
    "null": (),
}
"""Type -> the keywords that limit it. They have no meaning for other types."""
LEAST = frozenset(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"))
MOST = frozenset(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"))
ANYTHING = tuple(kind for kind in ORDER if kind != "integer")

Limits = Mapping[str, Any]


class SchemaCase(msgspec.Struct, frozen=True):
    """One type that a value may have.

    kind    the type
    limits  the schema keywords that limit values of this type
    values  the only values allowed, or None if they are not enumerated
    """

    kind: str
    limits: Limits = {}
    values: Sequence[Any] | None = None

    @property
    def free(self) -> bool:
        """Whether the case allows every value of its type."""
        return not self.limits and self.values is None

    def key(self) -> str:
        """Return a text that is the same for equal cases."""
        return json.dumps([self.kind, self.limits, self.values], sort_keys=True)


class Schemas:
    """Resolves the schemas in one tool's parameters, `root`. References refer to parts of `root`. A
    `path` is a schema's position in the parameters: "parameters.properties.x"."""

    def __init__(self, tool: DeclaredTool) -> None:
        self.tool = tool
        self.root: Any = {} if tool.parameters is None else tool.parameters

    def refuse(self, path: str, keyword: str, why: str = "cannot be enforced") -> NoReturn:
        """Raise NotWritable for the schema at `path`, because of its `keyword`."""
        raise NotWritable(self.tool.name, path, f"{keyword!r} {why}")

    def cases(self, schema: Any, path: str) -> list[SchemaCase]:
        """Return the cases of a schema, at least one. Raise NotWritable if the schema admits no
        value, or cannot be expressed as cases."""
        found = self._cases(self._flat(schema, path, MAX_REFS), path, MAX_REFS)
        kinds = {case.kind for case in found if case.free}
        distinct = {case.key(): case for case in found if case.free or case.kind not in kinds}
        if not distinct:
            self.refuse(path, "type", "admits no value")
        return [case for case in distinct.values() if case.kind != "integer" or not case.free
                or "number" not in kinds]  # fmt: skip

    # ---- references and combinations

    def _flat(self, schema: Any, path: str, depth: int) -> dict[str, Any]:
        """Return the schema without annotations. Its `$ref` and `allOf` are merged into it."""
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            self.refuse(
                path, "false" if schema is False else repr(schema), "is not a usable schema"
            )
        if depth == 0:
            self.refuse(path, "$ref", "refers to itself, or is nested too deeply")
        if fault := shape_fault(schema):
            self.refuse(path, *fault)
        flat = {
            key: value
            for key, value in schema.items()
            if key not in ANNOTATIONS and not key.startswith("x-") and key not in ("$ref", "allOf")
        }
        parts = [self._referred(schema["$ref"], path)] if "$ref" in schema else []
        parts += schema.get("allOf", ())
        for part in parts:
            flat = self._both(flat, self._flat(part, path, depth - 1), path)
        return flat

    def _referred(self, ref: Any, path: str) -> Any:
        at = self.root
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            self.refuse(path, "$ref", "must refer to a part of the same schema")
        for part in ref.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, Mapping) and name in at:
                at = at[name]
            else:
                self.refuse(path, "$ref", f"refers to nothing: {ref}")
        return at

    def _both(self, one: dict[str, Any], other: dict[str, Any], path: str) -> dict[str, Any]:
        """Return the schema of the values that satisfy both schemas."""
        if not one or not other:
            return one or other
        for a, b in ((one, other), (other, one)):
            closed = a.get("additionalProperties", True) is not True
            if closed and not b.get("properties", {}).keys() <= a.get("properties", {}).keys():
                self.refuse(path, "additionalProperties", "cannot be combined with other schemas")
        merged = dict(one)
        for key, value in other.items():
            merged[key] = self._merged(key, one[key], value, path) if key in one else value
        return merged

    def _merged(self, key: str, one: Any, other: Any, path: str) -> Any:
        if one == other and type(one) is type(other):
            return one
        if key in LEAST | MOST:
            return (max if key in LEAST else min)(one, other)
        match key:
            case "type":
                return [kind for kind in _types(one) if kind in _types(other)]
            case "enum":
                return [value for value in one if value in other]
            case "required":
                return list(dict.fromkeys([*one, *other]))
            case "properties":
                shared = {
                    name: {"allOf": [one[name], other[name]]} for name in one if name in other
                }
                return {**one, **other, **shared}
        self.refuse(path, key, "is set twice with values that cannot be combined")

    def _cases(self, flat: dict[str, Any], path: str, depth: int) -> list[SchemaCase]:
        keyword = next((key for key in ("anyOf", "oneOf") if key in flat), None)
        if keyword is None:
            return self._leaf(flat, path)
        if depth == 0:
            self.refuse(path, keyword, "is nested too deeply")
        options = flat.pop(keyword)
        if not options:
            self.refuse(path, keyword, "must not be empty")
        found: list[list[SchemaCase]] = []
        for option in options:
            both = self._both(flat, self._flat(option, path, depth - 1), path)
            found.append(self._cases(dict(both), path, depth - 1))
            if sum(map(len, found)) > MAX_CASES:
                self.refuse(path, keyword, f"has more than {MAX_CASES} options")
        if keyword == "oneOf" and not self._exclusive(found):
            self.refuse(path, keyword, "has options that may not exclude each other; use 'anyOf'")
        return [case for cases in found for case in cases]

    def _exclusive(self, options: Sequence[Sequence[SchemaCase]]) -> bool:
        return all(
            self._disjoint(a, b)
            for n, option in enumerate(options)
            for other in options[:n]
            for a in option
            for b in other
        )

    def _disjoint(self, a: SchemaCase, b: SchemaCase) -> bool:
        """Return whether no value belongs to both cases."""
        if a.values is not None and b.values is not None:
            return not any(same(x, y) for x in a.values for y in b.values)
        if a.kind != b.kind:
            return {a.kind, b.kind} != {"integer", "number"}
        if a.kind != "object":
            return False
        shared = set(a.limits.get("required", ())) & set(b.limits.get("required", ()))
        return any(_tags_differ(a.limits, b.limits, name) for name in shared)

    # ---- one schema

    def _leaf(self, flat: dict[str, Any], path: str) -> list[SchemaCase]:
        known = {"type", "enum", "const", "nullable"}.union(*LIMITS.values())
        for key, value in flat.items():
            harmless = (key, value) == ("uniqueItems", False)
            if key not in known and not harmless:
                self.refuse(path, key)
        kinds = self._kinds(flat, path)
        limits = {kind: _limits(flat, kind) for kind in kinds}
        if "enum" not in flat and "const" not in flat:
            return [SchemaCase(kind, limits[kind]) for kind in kinds]
        values = flat.get("enum", [flat.get("const")])
        if "const" in flat:
            values = [value for value in values if same(value, flat["const"])]
        by_kind: dict[str, list[Any]] = {}
        for value in values:
            kind = next((k for k in kinds if is_kind(value, k)), None)
            if kind and self._fits(value, limits[kind], path):
                by_kind.setdefault(kind, []).append(value)
        return [SchemaCase(kind, {}, found) for kind, found in by_kind.items()]

    def _kinds(self, flat: dict[str, Any], path: str) -> list[str]:
        """Return the types that the schema allows, in the order in which parsers try them."""
        if "type" in flat:
            found = set(_types(flat["type"]))
            if not found <= set(ORDER):
                self.refuse(path, "type", f"must be {one_of(ORDER)}")
            found |= {"null"} if flat.get("nullable") is True else set()
        else:
            found = {kind for kind, keys in LIMITS.items() if any(key in flat for key in keys)}
            found = found - {"integer"} or set(ANYTHING)
        return [kind for kind in ORDER if kind in found]

    def _fits(self, value: Any, limits: Limits, path: str) -> bool:
        """Return whether an enumerated value is within the other `limits` of its schema. Raise
        NotWritable for a limit that cannot be checked."""
        for key, limit in limits.items():
            match key:
                case "minLength" | "maxLength":
                    ok = len(value) >= limit if key == "minLength" else len(value) <= limit
                case "pattern":
                    ok = self._matches(limit, value, path)
                case "minimum" | "maximum":
                    ok = value >= limit if key == "minimum" else value <= limit
                case "exclusiveMinimum" | "exclusiveMaximum":
                    ok = value > limit if key == "exclusiveMinimum" else value < limit
                case "multipleOf":
                    ok = limit > 0 and math.isclose(value / limit, round(value / limit))
                case _:
                    self.refuse(path, key, "cannot be enforced beside 'enum' or 'const'")
            if not ok:
                return False
        return True

    def _matches(self, pattern: str, value: str, path: str) -> bool:
        try:
            return re.search(pattern, value) is not None
        except re.error as fault:
            self.refuse(path, "pattern", f"is not understood: {fault}")


def anything(cases: Sequence[SchemaCase]) -> bool:
    """Return whether the cases admit every value, like those of an empty schema."""
    return {case.kind for case in cases if case.free} >= set(ANYTHING)


def is_kind(value: Any, kind: str) -> bool:
    """Return whether the JSON value has the type `kind`."""
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "integer" | "number":
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
            return kind == "number" or value == math.floor(value)
        case "object":
            return isinstance(value, Mapping)
    return isinstance(value, list)


def _types(declared: Any) -> list[str]:
    return declared if isinstance(declared, list) else [declared]


def _limits(flat: Mapping[str, Any], kind: str) -> dict[str, Any]:
    found = {key: flat[key] for key in LIMITS[kind] if key in flat}
    if found.get("additionalProperties") is True and not found.get("properties"):
        del found["additionalProperties"]  # no limit
        found.pop("properties", None)
    return found


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. Unlike in Python, true is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _tags_differ(a: Limits, b: Limits, name: str) -> bool:
    """Return whether property `name` always differs between two objects with these limits."""
    values = []
    for limits in (a, b):
        schema = limits.get("properties", {}).get(name)
        if not isinstance(schema, Mapping) or not ("const" in schema or "enum" in schema):
            return False
        values.append([schema["const"]] if "const" in schema else schema["enum"])
    return not any(same(x, y) for x in values[0] for y in values[1])


# ---- the values of the keywords


def shape_fault(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (keyword, what is wrong with its value) for the first keyword with a malformed value;
    None if there is none."""
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
