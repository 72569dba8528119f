"""Wrong values for every field of a JSON Schema, at every depth."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tests.support.json_schema import fits

Schema = Mapping[str, Any]
KINDS: tuple[Any, ...] = (
    *("many", "NaN", "", 0, -1, 1.5, 10**30, True, None, [], [[]], ["many"], {}, {"zz": {}}),
)
"""Values of every kind of JSON."""
MODEL = "scripted"
"""The example of a text: the name of the model of a `ScriptedEngine`."""
NOTES = {"title", "description", "default", "examples", "discriminator", "format", "propertyNames"}
"""Keywords that allow or forbid no value."""


Wrap = Callable[[Any], Any]
"""Puts the value of a field into a body."""


class FieldPlace(NamedTuple):
    """A field in a body."""

    #: Keys and indexes from the root.
    keys: tuple[str | int, ...]
    #: A body in which the field has a value that its schema allows, as far as that is simple.
    body: Any
    schema: Schema

    @property
    def path(self) -> str:
        """The path as errors write it: "messages[0].content"."""
        parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys)
        return "".join(parts).removeprefix(".")

    def with_value(self, value: Any) -> Any:
        """Return the body with another value of the field."""
        return _replaced(self.body, self.keys, value)


def _replaced(body: Any, keys: tuple[str | int, ...], value: Any) -> Any:
    if not keys:
        return value
    first, rest = keys[0], keys[1:]
    if isinstance(body, list):
        return [_replaced(each, rest, value) if n == first else each for n, each in enumerate(body)]
    return {**body, first: _replaced(body[first], rest, value)}


class WrongValues:
    """The wrong values of the fields of one body.

    schema      the schema of the body
    components  the schemas that it may refer to, by name
    """

    def __init__(self, schema: Schema, components: Mapping[str, Schema]) -> None:
        self._root = {"components": {"schemas": {k: _bare(v) for k, v in components.items()}}}
        self._schema = _bare(schema)

    def places(self) -> Iterator[FieldPlace]:
        """Yield every field, and every item of a list. The fields of a component are yielded where
        it occurs first."""
        seen: set[tuple[str | int, ...]] = set()
        for place in self._places(self._schema, (), lambda value: value, set()):
            if place.keys and place.keys not in seen:
                seen.add(place.keys)
                yield place

    def of(self, place: FieldPlace) -> Iterator[Any]:
        """Yield the values that are wrong in a place, whichever way leads to it."""
        schemas = list(self._at(self._schema, place.keys))
        for value in KINDS:
            if not any(fits(value, schema, self._root) for schema in schemas):
                yield value

    def _at(self, schema: Schema, keys: tuple[str | int, ...]) -> Iterator[Schema]:
        """Yield each schema that a value at the path `keys` may have."""
        for arm in self._arms(schema):
            if not keys:
                yield arm
            elif isinstance(keys[0], int):
                yield from self._at(_item_schema(arm, keys[0]), keys[1:])
            elif keys[0] in arm.get("properties", {}):
                yield from self._at(arm["properties"][keys[0]], keys[1:])

    def _places(
        self, schema: Schema, keys: tuple[Any, ...], wrap: Wrap, refs: set[Any]
    ) -> Iterator[FieldPlace]:
        yield FieldPlace(keys, wrap(self._example(schema)), schema)
        for name, arm in self._named_arms(schema):
            if name in refs:
                continue
            refs |= {name} - {None}
            least = self._example(arm)
            for key, inner in arm.get("properties", {}).items():
                member = _within_object(wrap, least, key)
                yield from self._places(inner, (*keys, key), member, refs)
            if arm.get("type") == "array":
                item = _within_list(wrap, least)
                yield from self._places(_item_schema(arm, 0), (*keys, 0), item, refs)

    def _arms(self, schema: Schema) -> Iterator[Schema]:
        """Yield the members of a union of schemas, or the schema itself."""
        for _, arm in self._named_arms(schema):
            yield arm

    def _named_arms(
        self, schema: Schema, name: str | None = None
    ) -> Iterator[tuple[str | None, Schema]]:
        """Yield the same with the name of the component that a member is; None: it is none."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            yield from self._named_arms(self._root["components"]["schemas"][name], name)
        elif "anyOf" in schema:
            for arm in schema["anyOf"]:
                yield from self._named_arms(arm)
        else:
            yield name, schema

    def _example(self, schema: Schema) -> Any:
        """Return a small value that the first arm of a schema allows."""
        arm = next(self._arms(schema))
        if "const" in arm:
            return arm["const"]
        if "enum" in arm:
            return arm["enum"][0]
        kind = arm.get("type")
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                inner = arm.get("properties", {})
                return {name: self._example(inner[name]) for name in arm.get("required", ())}
            case "array":
                if "prefixItems" in arm:
                    return [self._example(item) for item in arm["prefixItems"]]
                return [self._example(arm.get("items", {}))] * max(1, arm.get("minItems", 0))
            case "string":
                return MODEL
            case "integer" | "number":
                return max(arm.get("minimum", 1), 1 if arm.get("maximum", 1) >= 1 else 0)
            case "boolean":
                return False
        return None


def _within_object(wrap: Wrap, others: Mapping[str, Any], key: str) -> Wrap:
    return lambda value: wrap({**others, key: value})


def _within_list(wrap: Wrap, items: list[Any]) -> Wrap:
    return lambda value: wrap([value, *items[1:]])


def _item_schema(schema: Schema, index: int) -> Schema:
    prefix = schema.get("prefixItems", [])
    found: Schema = prefix[index] if index < len(prefix) else schema.get("items") or {}
    return found


def _bare(schema: Any) -> Any:
    """Return a schema without NOTES, and with `prefixItems` as a length."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    bare = {key: _bare(value) for key, value in schema.items() if key not in NOTES}
    if isinstance(schema.get("properties"), Mapping):
        bare["properties"] = {name: _bare(each) for name, each in schema["properties"].items()}
    return bare


# ---- refusals

_FOREIGN = re.compile(r"`|\b(Expected|int|str|float|bool|dict|None|NoneType|True|False)\b")
"""Words of Python and of msgspec."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def fault_in(message: str, path: str) -> str:
    """Return what is wrong with the refusal of the field at `path`; "" if nothing is."""
    if not message.startswith(path) or message[len(path) : len(path) + 1] not in (":", ".", "["):
        return "it does not start with the path"
    return "it has foreign words" if _FOREIGN.search(_QUOTED.sub("", message)) else ""
