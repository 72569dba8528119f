"""Descriptions of the fields of structs, from the docstrings of the structs that declare them.

A docstring describes fields below its first paragraph, in lines such as

    seed        the start of the random numbers. Default: a random one
    regex, ebnf   what the answer must match
    stop        a description may go on
                in lines that are indented. Example: ["\\n"]

A struct inherits the descriptions of its bases, as it inherits the fields. If it repeats fields of
another struct that is not a base, its class attribute `described_like` names that struct.

The OpenAPI document has each description as a sentence, and its JSON after "Example:" as a member
of `examples`. The fields of request bodies are in order of importance there.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec.inspect import StructType, Type, multi_type_info

_FIELDS = re.compile(r"(\w+(?:, \w+)*)(?: {2,}(\S.*))?")
_EXAMPLE = re.compile(r"(.*?)\s*\bExample: (\S.*)", re.DOTALL)
_WORD = re.compile(r"[a-z]+(?=[ ,.;]|$)")
FIRST = (
    *("model", "messages", "input", "prompt", "token_ids", "input_prefix", "input_suffix"),
    *("query", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("n_predict", "num_predict", "sampling_params", "stream", "temperature", "system"),
    *("instructions", "stop", "stop_sequences", "seed", "top_p", "top_k", "tools", "tool_choice"),
    *("response_format", "text", "reasoning_effort", "reasoning", "thinking", "n", "logprobs"),
)
"""The fields that most requests use, in the order in which they are listed."""
LAST = ("Not supported", "Without effect", "Accepted only")
"""A field whose description begins so is listed after all others."""


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
    """Return the descriptions of a struct's fields: its own, those of its bases, and those of the
    struct that it names as `described_like`."""
    fields: dict[str, str] = {}
    like: type[msgspec.Struct] | None = getattr(kind, "described_like", None)
    if like is not None:
        fields |= field_descriptions(like)
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct):
            fields |= split_docstring(base)[1]
    return {name: fields[name] for name in kind.__struct_fields__ if name in fields}


def as_sentence(text: str) -> str:
    """Return a description with a capital letter and a full stop, unless it begins with a value."""
    if found := _WORD.match(text):
        text = found[0].capitalize() + text[found.end() :]
    return text if not text or text.endswith((".", "?")) else f"{text}."


def documented(description: str) -> dict[str, Any]:
    """Return the members of a field's schema that its description gives. Raises ValueError if an
    example is not JSON."""
    found = _EXAMPLE.fullmatch(description)
    if found is None:
        return {"description": as_sentence(description)}
    return {"description": as_sentence(found[1]), "examples": [json.loads(found[2])]}


def describe(components: dict[str, Any], types: Iterable[Any]) -> None:
    """Move the descriptions of fields to the fields, in the JSON schemas of the structs in `types`.

    components   name of a struct -> its schema, whose description is the struct's docstring
    """
    for kind in structs_in(types):
        schema = components.get(kind.__name__, {})
        fields = schema.get("properties", {})
        descriptions = field_descriptions(kind)
        for name, encoded in zip(
            kind.__struct_fields__, kind.__struct_encode_fields__, strict=True
        ):
            if encoded in fields and name in descriptions:
                fields[encoded] = {**fields[encoded], **documented(descriptions[name])}
        if "description" in schema:
            schema["description"] = split_docstring(kind)[0]


def sort_fields(components: dict[str, Any], bodies: Iterable[Any]) -> None:
    """Sort the fields in the JSON schemas of the structs in `bodies`: those of FIRST, others that
    are required, the rest as declared, those of LAST."""
    for kind in structs_in(bodies):
        schema = components.get(kind.__name__, {})
        if "properties" in schema:
            required = set(schema.get("required", ()))
            order = sorted(
                schema["properties"].items(),
                key=lambda field: (
                    field[1].get("description", "").startswith(LAST),
                    FIRST.index(field[0]) if field[0] in FIRST else len(FIRST),
                    field[0] not in required,
                ),
            )
            schema["properties"] = dict(order)


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
