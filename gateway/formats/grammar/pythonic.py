"""Calls as Python writes them, written. See `tools/pythonic`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar.arguments import arguments
from gateway.formats.grammar.forms import either, sequence, several
from gateway.formats.grammar.strings import Quotes
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.pythonic import MAX_NAME_CHARS, NAME, Pythonic
from gateway.formats.schema_cases import Schemas
from gateway.formats.string_escapes import CONTROLS, StringEscapes
from gateway.formats.value_syntax import HEX, NUMBERED, Notation, Values
from protocol.grammar import Form, Pattern

KEYWORD = re.compile(r"[^\W\d]\w*")
ANY_KEYWORD = Pattern("[A-Za-z_][A-Za-z0-9_]{0,63}")


ESCAPED = rf"{NUMBERED}|\\x{HEX}{{2}}|\\U000[1-9a-fA-F]{HEX}{{4}}"


def _quotes(quote: str) -> Quotes:
    escapes = {"\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", quote: "\\" + quote}
    return Quotes(quote, StringEscapes(never=CONTROLS, escapes=escapes, numbered=ESCAPED))


PYTHON = Notation(
    name="python", strings=(_quotes('"'), _quotes("'")), words=("None", "True", "False")
)
COMMA = Pattern(", ?")


def stretch(
    syntax: Pythonic, opener: str, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    call = book.rule("call", either(_call(tool, book) for tool in tools))
    if not syntax.brackets:
        return sequence("\n", several(call, "\n", many=many), "\n" + syntax.close[0])
    calls = several(call, COMMA, many=many)
    if opener in syntax.open:
        return sequence("[", calls, "]" + syntax.close[0])
    return sequence(calls, "]")


def _call(tool: DeclaredTool, book: GrammarBuilder) -> Form:
    if not NAME.fullmatch(tool.name) or len(tool.name) >= MAX_NAME_CHARS:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    values = Values(PYTHON, Schemas(tool), book)

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        if key is not None and not (KEYWORD.fullmatch(key) and len(key) < MAX_NAME_CHARS):
            return None
        return sequence(ANY_KEYWORD if key is None else key, "=", values.value(schema, path))

    return sequence(tool.name + "(", arguments(values, write, COMMA), ")")
