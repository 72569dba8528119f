"""Base classes of the formats that cover a whole answer, and of their parsers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.formats.call_parser import CallParser, CallSyntax
from gateway.formats.event_builder import EventBuilder
from gateway.formats.grammar_builder import AnswerFrame, GrammarBuilder
from gateway.formats.lexicon import MarkerPart
from gateway.formats.parser import FormatParser, ParserContext, Syntax
from protocol.engine.grammar import Form


class AnswerParser(FormatParser):
    """Base of the parsers that read a whole answer: content, reasoning and calls.

    In the state "calls", `call_parser` reads the text. A subclass must define `start`, which enters
    the first state. A subclass whose answers have calls also defines `call_syntax`, and
    `on_calls_done`, which enters the state after a group of calls.
    """

    UNSCANNED = frozenset({"calls"})

    def __init__(
        self,
        syntax: Any,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> None:
        self.syntax = syntax
        own = dict(state or {})
        inner, calls = own.pop("section", None), self.call_syntax()
        self.call_parser: CallParser | None = None
        if calls is not None:
            self.call_parser = calls.call_parser(self.call_context(context), builder, inner)
        super().__init__(context, builder, own or None)
        if state is None:
            self.start(starts_inside)
            self._update_scanner()

    def call_syntax(self) -> CallSyntax | None:
        """Return the syntax of calls that `call_parser` reads, or None if there is none."""
        return None

    def call_context(self, context: ParserContext) -> ParserContext:
        """Return the context for the call parser, given that of this parser."""
        return context

    @abstractmethod
    def start(self, starts_inside: bool) -> None:
        """Enter the first state. `starts_inside` means that the prompt has opened the reasoning."""

    def on_calls_done(self) -> None:
        """Enter the state after a group of calls."""

    def state(self) -> dict[str, Any]:
        return super().state() | {"section": self.call_parser.state() if self.call_parser else None}

    @property
    def calls(self) -> CallParser:
        assert self.call_parser is not None
        return self.call_parser

    def open_calls(self, marker: str) -> None:
        self.s.at = "calls"
        self.calls.open(marker)
        self.leave_if_done()

    def leave_if_done(self) -> None:
        if self.calls.s.done:
            self.on_calls_done()

    def read_calls(self, piece: str | MarkerPart) -> str:
        call_parser = self.call_parser
        assert call_parser is not None
        rest = call_parser.read(piece)
        if call_parser.s.done:
            self.on_calls_done()
        return rest

    def read_call_token(self, marker: str) -> None:
        self.calls.read_token(marker)
        self.leave_if_done()

    def on_part(self, part: MarkerPart) -> str:
        return self.read_calls(part) if self.s.at == "calls" else ""


class AnswerSyntax(Syntax, frozen=True, kw_only=True):
    """A format that covers the whole answer. Its grammars start where the prompt or the reasoning
    ends."""

    PARSER: ClassVar[type[AnswerParser]]

    @property
    def frames_content(self) -> bool:
        """Whether the format writes markers around content, or a header before it."""
        return True

    def parser(
        self,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> FormatParser:
        """Return a parser. If `starts_inside`, the prompt has already opened the reasoning."""
        return self.PARSER(self, context, builder, state, starts_inside=starts_inside)

    def frame(self) -> AnswerFrame:
        """Return the markup around the reasoning and around the answer proper."""
        raise NotImplementedError

    def write_required(self, grammar: GrammarBuilder) -> Form:
        """Return the grammar of calls and nothing else."""
        raise NotImplementedError

    def write_strict(self, grammar: GrammarBuilder) -> Form:
        """Return the grammar of any messages in which every call is a valid call of a tool."""
        raise NotImplementedError
