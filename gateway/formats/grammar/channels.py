"""Answers of elements, Kimi K3's: what stands around their content, and where their calls may."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.formats.event_builder import DeclaredTool
from gateway.formats.grammar.forms import FREE, behind, either, optional, sequence
from gateway.formats.grammar.frame import Frame
from gateway.formats.grammar.xtml import tools_element
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.xtml import Xtml
from protocol.grammar import Form, LiteralForm, Until


def frame(syntax: Xtml) -> Frame:
    return Frame(
        opens=_open(syntax, "think"),
        closes=_close(syntax, "think"),
        before=_open(syntax, "response"),
        after=_close(syntax, "response"),
    )


def required(syntax: Xtml, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder) -> Form:
    return sequence(
        tools_element(syntax, tools, many, book), optional(LiteralForm(_close(syntax, "message")))
    )


def strict(syntax: Xtml, tools: Sequence[DeclaredTool], many: bool, book: GrammarBuilder) -> Form:
    """A response, whose opening tag the prompt may have written, and calls behind it."""
    opened, end = (
        optional(LiteralForm(_open(syntax, "response"))),
        LiteralForm(_close(syntax, "message")),
    )
    calls = book.rule("calls", required(syntax, tools, many, book))
    closed = sequence(Until(_close(syntax, "response")), optional(either((calls, end))))
    opener = _open(syntax, "tools")
    broken_off = sequence(Until(opener), behind(opener, required(syntax, tools, many, book)))
    return either((calls, sequence(opened, either((closed, broken_off, FREE)))))


def _open(syntax: Xtml, name: str) -> str:
    return f"{syntax.open}{name}{syntax.separator}"


def _close(syntax: Xtml, name: str) -> str:
    return f"{syntax.close}{name}{syntax.separator}"
