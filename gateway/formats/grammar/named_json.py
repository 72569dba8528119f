"""Calls whose name stands between markers, with bare JSON arguments behind it."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar.forms import either, optional, sequence, several
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.mistral import ID_CHARS
from gateway.formats.named_json import NamedJson
from protocol.grammar import Form, Pattern

CALL_ID = Pattern(f"[a-zA-Z0-9]{{{ID_CHARS}}}")
INDEX = Pattern("0|[1-9][0-9]{0,3}")
"""Of a call in its conversation: the model goes on counting where an earlier answer ended."""


def stretch(
    syntax: NamedJson, opener: str, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder
) -> Form:
    call = book.rule("call", either(_call(syntax, tool, book) for tool in tools))
    if opener not in syntax.section_open:
        return call
    first, closer = syntax.call_open[0], syntax.section_close
    end = closer[syntax.section_open.index(opener)] if closer else ""
    return sequence(several(sequence(first, call), syntax.between, many=many), end)


def _call(syntax: NamedJson, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    """What stands behind the marker that begins a call."""
    return sequence(
        syntax.kind + _first(syntax.kind_end),
        *([f"functions.{tool.name}:", INDEX] if syntax.name_is_id else [tool.name]),
        *([_id(syntax.id_begin[0])] if _has_ids(syntax, book) else []),
        _first(syntax.name_end),
        arguments(syntax, tool, book),
    )


def arguments(syntax: NamedJson, tool: DeclaredTool, book: GrammarBuilder) -> Form:
    """What stands behind the name, up to the end of the call."""
    before, behind = syntax.fence or ("", "")
    return sequence(
        before + syntax.fenced,
        book.arguments(tool),
        syntax.fenced + behind + _first(syntax.call_close),
    )


def _has_ids(syntax: NamedJson, book: GrammarBuilder) -> bool:
    return bool(syntax.id_begin) and book.lexicon.is_token(syntax.id_begin[0])


def _id(marker: str) -> Form:
    return optional(sequence(marker, CALL_ID))


def _first(markers: Sequence[str]) -> str:
    return markers[0] if markers else ""
