"""Answers of elements, Kimi K3's: what stands around their content, and where their calls may."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.output.grammar.book import Book
from gateway.output.grammar.forms import FREE, behind, either, optional, sequence
from gateway.output.grammar.frame import Frame
from gateway.output.grammar.xtml import tools_element
from gateway.output.teller import DeclaredTool
from gateway.output.tools.xtml import Xtml
from protocol.grammar import Form, Text, Until


def frame(syntax: Xtml) -> Frame:
    return Frame(
        opens=_open(syntax, "think"),
        closes=_close(syntax, "think"),
        before=_open(syntax, "response"),
        after=_close(syntax, "response"),
    )


def required(syntax: Xtml, tools: Sequence[DeclaredTool], many: bool, book: Book) -> Form:
    return sequence(
        tools_element(syntax, tools, many, book), optional(Text(_close(syntax, "message")))
    )


def strict(syntax: Xtml, tools: Sequence[DeclaredTool], many: bool, book: Book) -> Form:
    """A response, whose opening tag the prompt may have written, and calls behind it."""
    opened, end = optional(Text(_open(syntax, "response"))), Text(_close(syntax, "message"))
    calls = book.rule("calls", required(syntax, tools, many, book))
    closed = sequence(Until(_close(syntax, "response")), optional(either((calls, end))))
    opener = _open(syntax, "tools")
    broken_off = sequence(Until(opener), behind(opener, required(syntax, tools, many, book)))
    return either((calls, sequence(opened, either((closed, broken_off, FREE)))))


def _open(syntax: Xtml, name: str) -> str:
    return f"{syntax.open}{name}{syntax.separator}"


def _close(syntax: Xtml, name: str) -> str:
    return f"{syntax.close}{name}{syntax.separator}"
