"""Calls as pairs of keys and values, written. See `tools/arg_pairs`.

A type between key and value may be left out; where it is written, the value is of it. Some models
write each tag on a line of its own, others all of them on one: both are admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.arg_pairs import MAX_NAME_CHARS, NAME, ArgPairs
from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar.arguments import arguments
from gateway.formats.grammar.forms import either, optional, quoted, sequence, several
from gateway.formats.grammar.plain import Ending, PlainValues
from gateway.formats.grammar_builder import GrammarBuilder, NotWritable
from gateway.formats.schema_cases import SchemaCase, Schemas, anything
from gateway.formats.value_syntax import Values, json_notation
from protocol.grammar import Form, LiteralForm, Pattern

ANY_KEY = Pattern(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")

LINE = optional(LiteralForm("\n"))


def stretch(
    syntax: ArgPairs, opener: str, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    x = syntax
    behind = either(_behind_call_open(x, tool, book) for tool in tools)
    if not x.open:
        return behind
    calls = several(book.rule("call", sequence(x.call_open, behind)), LINE, many=many)
    return sequence(LINE, calls, LINE, x.close[0])


def _behind_call_open(x: ArgPairs, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    if not NAME.fullmatch(tool.name) or len(tool.name) > MAX_NAME_CHARS:
        raise NotWritable(tool.name, "name", "this format cannot write it")
    values = Values(json_notation((x.value[1],)), Schemas(tool), book)
    plain = PlainValues(values, Ending(close=x.value[1], bare=x.bare_json))

    def write(key: str | None, schema: Any, path: str) -> Form | None:
        if key is not None and (key != key.strip() or not key or x.key[1] in key):
            return None
        name = ANY_KEY if key is None else key
        pair = sequence(x.key[0], name, x.key[1], LINE)
        return sequence(pair, _value(x, plain, key, schema, path), LINE)

    inside = sequence(
        tool.name + "".join(x.name_close), LINE, arguments(values, write), x.call_close
    )
    if not x.json_bodies:
        return inside
    head = '{"name": ' + quoted(tool.name) + ', "arguments": '
    body = sequence(LINE, head, book.arguments(tool), "}", LINE, x.call_close)
    return either((inside, body))


def _value(x: ArgPairs, plain: PlainValues, key: str | None, schema: Any, path: str) -> Form:
    value = sequence(x.value[0], plain.argument(key, schema, path))
    if not x.type:
        return value
    kinds: dict[str, list[SchemaCase]] = {}
    cases = plain.schemas.cases(schema, path)
    for case in [*cases, SchemaCase("integer")] if anything(cases) else cases:
        kinds.setdefault(case.kind, []).append(case)
    typed = (
        sequence(x.type[0] + kind + x.type[1], LINE, x.value[0], plain.of(cases, (kind,), path))
        for kind, cases in kinds.items()
    )
    return either((value, *typed))
