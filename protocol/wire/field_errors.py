"""The errors of msgspec in plain words: "must be a whole number of at least 1; got 0".

msgspec names the place of a value that does not fit its type. The type that is declared at this
place says what is allowed, and the value itself is what came. Of msgspec's own words only the shape
of the message is used.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from protocol.wire.field_words import allowed_words, plain_types, quoted, shown

MAX_SHORT_VALUES = 256
"""`_short_values` skips objects with more members than this."""
MAX_TAG_CHARS = 64
"""Most characters of a value that may determine the type of others."""
REQUIRED = "this field is required"
_WHERE = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`\Z")
"""The path at the end of msgspec's messages."""
_INDEX = re.compile(r"\[\d+\]")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
"""One step of a path: an index or a name."""
_STEP_OR_ANY = re.compile(r"\[(\d+)\]|\[\.\.\.\]|([^.\[\]]+)")
_ANY_KEY = "[...]"
"""msgspec writes this in a path instead of a mapping's key, which it does not name."""
_MISSING = re.compile(r"Object missing required field `([^`]*)`\Z")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`\Z", re.DOTALL)
_MISMATCH = re.compile(r"(?:Expected|Invalid|Object|Number|Integer) ")
"""Start of each message of msgspec about a value that does not fit its type."""
_OWN_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*): ")
"""Start of a message of our own about a field: "top_k: must be ..."."""
FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A key of a request that is safe to show."""


class FieldError(NamedTuple):
    """A value that does not fit its type."""

    #: Path of the field, such as "logit_bias.12" or "stop[2]"; "": the whole value.
    path: str
    #: What is wrong, in words.
    problem: str

    def below(self, path: str) -> FieldError:
        """Return the error with the path of a value of which the field at `path` has this one."""
        if not path or not self.path or self.path.startswith("["):
            return FieldError(path + self.path, self.problem)
        return FieldError(f"{path}.{self.path}", self.problem)

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


def field_error(error: msgspec.ValidationError, value: Any, kind: Any) -> FieldError:
    """Return an error of msgspec in words.

    value   the value that was converted, or that the text contains
    kind    the type that it does not fit
    """
    text = str(error)
    where = _WHERE.search(text)
    path = where[2] if where else ""
    message = text[: where.start()] if where else text
    if missing := _MISSING.match(message):
        return FieldError(_joined(path, missing[1]), REQUIRED)
    found = _Place([_type_of(kind)], value)
    key = None
    if where and (where[1] or _ANY_KEY in path):
        mapping, _, rest = path.partition(_ANY_KEY)
        key = _key_at_fault(text, value, kind, mapping)
        is_shown = key is not None and FIELD_NAME.fullmatch(str(key)) is not None
        if where[1]:
            place = _joined(path, str(key)) if is_shown else path
            return FieldError(place, _key_problem(found.at(path, None).types, key))
        found = found.at(path, key)
        rest = rest.replace(_ANY_KEY, "")
        path = (_joined(mapping, str(key)) if is_shown else mapping) + rest
    else:
        found = found.at(path, None)
    if unknown := _UNKNOWN.match(message):
        return _unknown_field(path, unknown[1], found.types)
    if not _MISMATCH.match(message):
        return _own_error(path, message)
    if "out of range" in message and not found.has_value:
        return FieldError(path, "the number is out of range")
    got = f"; got {shown(found.value)}" if found.has_value else ""
    return FieldError(path, f"must be {found.allowed}{got}")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_error(path: str, message: str) -> FieldError:
    """Return the error of a struct's own check, whose message may start with a field of it."""
    if own := _OWN_FIELD.match(message):
        return FieldError(_joined(path, own[1]), message[own.end() :])
    return FieldError(path, message)


def _unknown_field(path: str, name: str, types: list[inspect.Type]) -> FieldError:
    known = [
        field.encode_name
        for kind in types
        if isinstance(kind, inspect.StructType)
        for field in kind.fields
    ]
    nearest = get_close_matches(name, known, 1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known fields: {', '.join(known)}"
    if not FIELD_NAME.fullmatch(name):
        return FieldError(path, f"unknown field {quoted(name)}; {hint}")
    return FieldError(_joined(path, name), f"unknown field; {hint}")


def _key_problem(types: list[inspect.Type], key: Any) -> str:
    keys = [kind.key_type for kind in types if isinstance(kind, inspect.DictType)]
    got = "" if key is None else f"; got {shown(key)}"
    return f"each key must be {_allowed(keys)}{got}"


def _allowed(types: list[inspect.Type]) -> str:
    union = types[0] if len(types) == 1 else inspect.UnionType(tuple(types))
    return allowed_words(union)


# ---- the type and the value at a path


@cache
def _type_of_struct(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _type_of(kind: Any) -> inspect.Type:
    """Return the description of a type. That of a struct is kept, because it takes long."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _type_of_struct(kind)
    return inspect.type_info(kind)


_NO_VALUE = object()


class _Place(NamedTuple):
    """The types that are declared at a place, and the value there."""

    types: list[inspect.Type]
    value: Any

    @property
    def has_value(self) -> bool:
        return self.value is not _NO_VALUE

    @property
    def allowed(self) -> str:
        return _allowed(self.types)

    def at(self, path: str, key: Any) -> _Place:
        """Return the place at a path of msgspec's below this one.

        key   stands for the first `[...]` in the path; None: it was not found
        """
        place = _Place([each for kind in self.types for each in plain_types(kind)], self.value)
        for step in _STEP_OR_ANY.finditer(path):
            if step[1]:
                place = place._item(int(step[1]))
            elif step[2]:
                place = place._field(step[2])
            else:
                place, key = place._member(key), None
        return place

    def _item(self, index: int) -> _Place:
        types = [inner for kind in self.types for inner in _item_types(kind, index)]
        is_there = isinstance(self.value, list | tuple) and index < len(self.value)
        return _Place(types, self.value[index] if is_there else _NO_VALUE)

    def _member(self, key: Any) -> _Place:
        types = [
            each
            for kind in self.types
            if isinstance(kind, inspect.DictType)
            for each in plain_types(kind.value_type)
        ]
        is_there = isinstance(self.value, dict) and key in self.value
        return _Place(types, self.value[key] if is_there else _NO_VALUE)

    def _field(self, name: str) -> _Place:
        fields = self.value if isinstance(self.value, dict) else {}
        structs = [kind for kind in self.types if isinstance(kind, inspect.StructType)]
        tagged = [kind for kind in structs if kind.tag_field is not None]
        if tagged and name == tagged[0].tag_field:
            types: list[inspect.Type] = [inspect.LiteralType(tuple(kind.tag for kind in tagged))]
        else:
            chosen = [kind for kind in tagged if fields.get(kind.tag_field) == kind.tag]
            types = [
                each
                for kind in chosen or structs
                for field in kind.fields
                if field.encode_name == name
                for each in plain_types(field.type)
            ]
        return _Place(types, fields.get(name, _NO_VALUE))


def _item_types(kind: inspect.Type, index: int) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.TupleType):
        yield from plain_types(kind.item_types[index])
    elif isinstance(kind, inspect.CollectionType):
        yield from plain_types(kind.item_type)


# ---- the key of a mapping


def _key_at_fault(text: str, fields: Any, kind: Any, path: str) -> Any:
    """Return the key of the mapping at `path` that `kind` rejects; None if it is not found.

    msgspec's message `text` does not name the key. So a binary search finds the smallest n for
    which converting only the first n members of the mapping gives the same error. The last of these
    members has the rejected key. The objects around the mapping are converted with only their short
    values, which may determine the mapping's type.
    """
    steps = [int(index) if index else name for index, name in _STEP.findall(path)]
    around: list[dict[str, Any]] = []
    inner = fields
    for step in steps:
        around.append({} if isinstance(step, int) else _short_values(inner))
        inner = inner[step]
    members = list(inner.items())
    same = _INDEX.sub("[0]", text)

    def fails(count: int) -> bool:
        value: Any = dict(members[:count])
        for step, beside in zip(reversed(steps), reversed(around), strict=True):
            value = [value] if isinstance(step, int) else {**beside, step: value}
        try:
            msgspec.convert(value, kind, str_keys=True)
        except msgspec.ValidationError as error:
            return str(error) == same
        return False

    index = bisect_left(range(1, len(members) + 1), True, key=fails)
    return members[index][0] if index < len(members) else None


def _short_values(mapping: dict[str, Any]) -> dict[str, Any]:
    """Return the members of `mapping` that may determine the type of others, such as tags."""
    if len(mapping) > MAX_SHORT_VALUES:
        return {}
    return {
        key: value
        for key, value in mapping.items()
        if not isinstance(value, dict | list) and len(str(value)) <= MAX_TAG_CHARS
    }
