"""Kimi K3's calls, written. See `tools/xtml`.

An argument's tag says its type: a string is text up to its closing tag, everything else JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar.arguments import arguments
from gateway.formats.grammar.forms import either, sequence
from gateway.formats.grammar.plain import Ending, PlainValues
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, json_notation
from gateway.formats.xtml import MAX_TAG_CHARS, Xtml
from protocol.grammar import Form, LiteralForm, Pattern, Repeat

ANY_KEY = Pattern(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
INDEX = Pattern("[1-9][0-9]{0,2}")
"""Of a call behind the first; which it is the reader counts."""


def tools_element(
    syntax: Xtml, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    """The element of all calls, its tags included."""
    x = syntax
    close = _close(x, "call")
    bodies = [(_attribute(tool.name), _body(x, tool, book)) for tool in tools]

    def call(index: Form | str) -> Form:
        options = (
            sequence(f'tool="{name}" index="', index, f'"{x.separator}', body)
            for name, body in bodies
        )
        return sequence(f"{x.open}call ", either(options), close)

    more = Repeat(book.rule("call", call(INDEX))) if many else LiteralForm("")
    return sequence(_open(x, "tools"), call("1"), more, _close(x, "tools"))


def _open(x: Xtml, name: str) -> str:
    return f"{x.open}{name}{x.separator}"


def _close(x: Xtml, name: str) -> str:
    return f"{x.close}{name}{x.separator}"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _body(x: Xtml, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    """A call's arguments."""
    if len(tool.name) > MAX_TAG_CHARS // 2:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    ending = Ending(close=_close(x, "argument"))
    values = Values(json_notation(ending.words), Schemas(tool), book)
    plain = PlainValues(values, ending)

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        if key is not None and ("\n" in key or "<|" in key or len(key) > MAX_TAG_CHARS // 2):
            return None
        name = ANY_KEY if key is None else _attribute(key)
        tag = sequence(f'{x.open}argument key="', name, '" type="')
        return sequence(tag, _value(x, plain, values.schemas.cases(schema, path), path))

    return book.rule("arguments", arguments(values, write))


def _value(x: Xtml, plain: PlainValues, cases: Sequence[SchemaCase], path: str) -> Form:
    kinds: dict[str, list[SchemaCase]] = {}
    for case in cases:
        kinds.setdefault(TYPES.get(case.kind, case.kind), []).append(case)
    ways = []
    for kind, found in kinds.items():
        if kind != "string":
            value = either(plain.values.case(case, path) for case in found)
            value = sequence(value, plain.ending.close)
        elif anything(cases):
            value = plain.text()
        else:
            value = plain.of(found, ("string",), path)
        ways.append(sequence(f'{kind}"{x.separator}', value))
    return either(ways)


TYPES = {"integer": "number"}
"""What the model calls a type, where it is not what schemas call it."""
