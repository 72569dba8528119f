"""Calls as tags with a tag for each argument, written. See `tools/xml_parameters`.

Arguments are plain text; where a tag says whether its value is a string, others are JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar.arguments import arguments
from gateway.formats.grammar.forms import either, sequence, several
from gateway.formats.grammar.plain import Ending, PlainValues
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, json_notation
from gateway.formats.xml_parameters import MAX_TAG_CHARS, PLAIN_NAME, XmlParameters
from protocol.grammar import Form, LiteralForm, Pattern

ANY_NAME = Pattern(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
IN_QUOTES = re.compile(r'[^"<\r\n]+')


def stretch(
    syntax: XmlParameters,
    opener: str,
    tools: Sequence[DeclaredTool],
    many: bool,
    book: GrammarBuilder,
) -> Form:
    x = syntax
    behind = either(_behind_call_open(x, tool, book) for tool in tools)
    line = LiteralForm(x.line)
    if opener == x.call_open:  # nothing closes such a stretch
        return several(behind, sequence(line, x.call_open), many=many)
    call = book.rule("call", sequence(x.call_before + x.call_open, behind, x.call_after, line))
    return sequence(line, several(call, many=many and x.many), x.close[0])


def _behind_call_open(x: XmlParameters, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    """One call, from its name on."""
    name = _written(x, tool.name)
    if name is None:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    return sequence(f"{name}>{x.line}", inside(x, tool, book), x.call_close)


def inside(x: XmlParameters, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    """A call's arguments, and nothing around them."""
    return arguments(*_writer(x, tool, book))


def _written(x: XmlParameters, name: str) -> str | None:
    """A name in a tag; None if it cannot stand there."""
    if len(name) > MAX_TAG_CHARS // 2:
        return None
    if x.quoted:
        return f'"{name}"' if IN_QUOTES.fullmatch(name) else None
    return name if PLAIN_NAME.fullmatch(name) else None


def _writer(x: XmlParameters, tool: DeclaredTool, book: GrammarBuilder) -> tuple[Values, Any]:
    ends_call = (x.call_close,) if x.close and x.doubts else ()
    ending = Ending(
        close=x.parameter_close, others=ends_call, around=x.around, trim=x.trim, bare=x.bare_json
    )
    values = Values(json_notation(ending.words), Schemas(tool), book)
    plain = PlainValues(values, ending)

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        name = ANY_NAME if key is None else _written(x, key)
        if name is None:
            return None
        quote = '"' if key is None and x.quoted else ""
        tag = sequence(x.parameter_open + quote, name, quote)
        if x.string_key:
            value = _said(x, plain, values.schemas.cases(schema, path), path)
        else:
            value = sequence(">", plain.argument(key, schema, path))
        return sequence(tag, value, x.line)

    return values, write


def _said(x: XmlParameters, plain: PlainValues, cases: Sequence[SchemaCase], path: str) -> Form:
    """A value whose tag says whether it is a string."""
    strings = [case for case in cases if case.kind == "string"]
    others = [case for case in cases if case.kind != "string"]
    ways = []
    if strings:
        text = plain.text() if anything(cases) else plain.of(strings, ("string",), path)
        ways.append(sequence(f' {x.string_key}="true">', text))
    if others:
        value = either(plain.values.case(case, path) for case in others)
        ways.append(sequence(f' {x.string_key}="false">', value, x.parameter_close))
    return either(ways)
