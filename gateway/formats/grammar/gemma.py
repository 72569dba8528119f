"""Calls as Gemma writes them, written. See `tools/gemma`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.gemma import MAX_NAME_CHARS, NAME, Gemma
from gateway.formats.grammar.arguments import arguments
from gateway.formats.grammar.forms import either, sequence
from gateway.formats.grammar.strings import Marked
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.schema_cases import Schemas
from gateway.formats.value_syntax import BARE_KEY, Notation, Values
from protocol.grammar import Form, LiteralForm, Pattern

COMMA = LiteralForm(",")


def notation(syntax: Gemma) -> Notation:
    return Notation(
        name="gemma",
        strings=Marked(syntax.quote),
        bare=True,
        object=(LiteralForm("{"), LiteralForm("}")),
        array=(LiteralForm("["), LiteralForm("]")),
        colon=LiteralForm(":"),
        comma=COMMA,
    )


def stretch(
    syntax: Gemma, opener: str, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    calls = either(_call(syntax, tool, book) for tool in tools)
    return sequence("call:", calls, syntax.close)


def _call(syntax: Gemma, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    named = NAME.fullmatch("call:" + tool.name)
    if named is None or named[1] != tool.name or len(tool.name) > MAX_NAME_CHARS // 2:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    return sequence(tool.name, inside(syntax, tool, book))


def inside(syntax: Gemma, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    """A call's arguments."""
    values = Values(notation(syntax), Schemas(tool), book)

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        name = Pattern(BARE_KEY) if key is None else values.key(key)
        if name is None:
            return None
        return sequence(name, ":", values.value(schema, path))

    return sequence("{", arguments(values, write, COMMA), "}")
