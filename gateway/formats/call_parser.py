"""Base classes of the syntaxes whose tool calls come in groups, and of their parsers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.formats.event_builder import BLANKS, EventBuilder
from gateway.formats.events import Event
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.parser import NOTHING, FormatParser, FormatParserState, ParserContext, Syntax
from protocol.engine.grammar import Form


class CallParserState(FormatParserState):
    """Base of the states of call parsers.

    raw  text read but not emitted, which becomes content if it is not the start of a call
    """

    raw: list[str] = []


MARKUP = re.compile(r"<\S|\[[A-Z]")
"""The start of a marker that is no ordinary text."""

NO_CALL = "the marker of tool calls without a call after it"
UNFINISHED_CALL = "a tool call that is not finished"


class CallParser(FormatParser):
    """Parser of one group of tool calls. `open` starts the group, and `done` is set at its end.

    One parser reads any number of groups; `open` resets it.

    BETWEEN  states in which all calls so far are complete, and another may follow
    """

    s: Any
    BETWEEN: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        syntax: CallSyntax,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.syntax = syntax
        super().__init__(context, builder, state)

    @property
    def is_between(self) -> bool:
        return self.s.at in self.BETWEEN

    def open(self, marker: str) -> None:
        """Start a new group of calls after the opening `marker`."""
        self.s = self.State()
        self.on_open(marker)
        self._make_scanner(NOTHING)

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]

    def fast_event(self, text: str) -> Event | None:
        """Return the event for `text` if parsing it would change no state, else None. This is a
        shortcut for long arguments."""
        return None

    def on_end(self, complete: bool) -> None:
        if not complete:
            self.builder.abandon_call()
        elif self.builder.is_open:
            self.builder.parse_failed("the last tool call is not finished")
            self.builder.abandon_call()
        elif self.s.raw:
            self.s.raw += self.unread()
            self.reject(UNFINISHED_CALL)

    def unread(self) -> list[str]:
        """Return further texts, not in `raw`, that have been read but not emitted."""
        return []

    # ---- for subclasses

    def keep(self, text: str) -> None:
        """Add `text` to `raw`, unless a call has been emitted."""
        if self.s.raw and text:
            self.s.raw.append(text)

    def reject(self, why: str) -> None:
        """Emit the text kept so far as content, with a warning that it is not a call.

        There is no warning if the answer may be text of another form, because that text may start
        like a call.
        """
        text, self.s.raw = "".join(self.s.raw), []
        if self.context.calls_or_text:
            self.builder.content(text)
        else:
            self.builder.reject_call(text, why)

    def outside_calls(self, text: str) -> str:
        """Skip blanks between calls. Return the other text: it is an error, or shows that this is
        not a call."""
        s = self.s
        rest = text.lstrip(BLANKS)
        self.keep(text[: len(text) - len(rest)])
        if rest and s.raw:
            self.reject(NO_CALL)
            s.done = True
        elif rest:
            self.builder.parse_failed("text between tool calls")
            s.at = "broken"
        return rest

    def broken_text(self, text: str) -> None:
        """Handle text that breaks the syntax. Emit it unchanged: as arguments of the open call, or
        else as content. If no call has been emitted, add it to `raw` instead."""
        if self.builder.is_open:
            self.builder.arguments_delta(text)
        elif self.s.raw:
            self.s.raw.append(text)
        else:
            self.builder.content(text)


class CallSyntax(Syntax, frozen=True, kw_only=True):
    """A syntax of tool calls that come in groups, with content between the groups."""

    PARSER: ClassVar[type[CallParser]]

    def openers(self) -> tuple[str, ...]:
        """Return the markers that open a group anywhere in content, in order of precedence."""
        raise NotImplementedError

    def start_openers(self) -> tuple[str, ...]:
        """Return the openers that open a group only at the start of the answer, after blanks. They
        are always searched for as text, never as tokens. If no call follows, they are content."""
        return ()

    def mistaken_openers(self) -> tuple[str, ...]:
        """Return the openers that models write by mistake instead of others. A grammar leaves out
        those with a special token, because the text around calls has no special tokens."""
        return ()

    def signs(self) -> tuple[str, ...]:
        """Return the markers without a meaning outside of calls. If an answer without calls has one
        of them in its content, the model has tried to write a call."""
        return tuple(filter(MARKUP.match, self.markers()))

    def bound_marker(self, opener: str) -> str:
        """Return the marker that must follow the opener, or "" if none must."""
        return ""

    def call_id(self, ours: str) -> str:
        """Return the id `ours` in the form that this format requires."""
        return ours

    def call_parser(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        return self.PARSER(self, context, builder, state)

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        """Return the grammar of the text after `opener`, up to and including the marker that closes
        the calls.

        If `grammar.many`, it admits as many calls as the syntax writes in one group, otherwise
        exactly one. The parser reads every text that the grammar admits without a warning.
        """
        raise NotImplementedError

    def write_values(self, grammar: GrammarBuilder) -> Form | None:
        """Return the grammar of calls without a marker, as JSON values; None for other syntaxes. It
        is used if the answer may be calls or other JSON."""
        return None
