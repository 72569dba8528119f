"""Descriptions of the fields of structs, from the docstrings of the structs that declare them.

A docstring describes fields below its first paragraph, in lines such as

    seed        -1 means no seed
    regex, ebnf   from SGLang
    continued   a description may go on
                in lines that are indented

A struct inherits the descriptions of its bases, as it inherits the fields.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec.inspect import StructType, Type, multi_type_info

_FIELDS = re.compile(r"(\w+(?:, \w+)*)(?: {2,}(\S.*))?")


def split_docstring(kind: type[msgspec.Struct]) -> tuple[str, dict[str, str]]:
    """Return the docstring of a struct without its descriptions of fields, and these, by field."""
    prose: list[str] = []
    described: dict[str, list[str]] = {}
    current: tuple[str, ...] = ()
    for line in inspect.cleandoc(kind.__dict__.get("__doc__") or "").splitlines():
        found = _FIELDS.fullmatch(line)
        names = tuple(found[1].split(", ")) if found else ()
        if found and set(names) <= set(kind.__struct_fields__):
            current = names
            for name in names:
                described[name] = [found[2]] if found[2] else []
        elif current and line.startswith("  "):
            for name in current:
                described[name].append(line.strip())
        else:
            current = ()
            prose.append(line)
    fields = {name: " ".join(lines) for name, lines in described.items()}
    return "\n".join(prose).strip(), fields


def field_descriptions(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the descriptions of a struct's fields, its own and those of its bases."""
    fields: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct):
            fields |= split_docstring(base)[1]
    return fields


def describe(components: dict[str, Any], types: Iterable[Any]) -> None:
    """Move the descriptions of fields to the fields, in the JSON schemas of the structs in `types`.

    components   name of a struct -> its schema, whose description is the struct's docstring
    """
    for kind in structs_in(types):
        schema = components.get(kind.__name__, {})
        fields = schema.get("properties", {})
        for name, description in field_descriptions(kind).items():
            if name in fields:
                fields[name] = {**fields[name], "description": description}
        if "description" in schema:
            schema["description"] = split_docstring(kind)[0]


def structs_in(types: Iterable[Any]) -> Iterator[type[msgspec.Struct]]:
    """Yield each struct that occurs in `types`, at any depth, once."""
    seen: set[type] = set()
    found: list[Any] = list(multi_type_info(list(types)))
    while found:
        each = found.pop()
        if isinstance(each, StructType):
            if each.cls in seen:
                continue
            seen.add(each.cls)
            yield each.cls
        for name in each.__struct_fields__:
            value = getattr(each, name)
            parts = value if isinstance(value, tuple) else (value,)
            found += [part for part in parts if isinstance(part, (Type, msgspec.inspect.Field))]
