"""Base of all format parsers: pieces in, events out, with states and markers as tables.

A parser is in one state at a time. In each state it looks for the markers that its table lists for
that state, and calls `on_text` and `on_marker` in the order of the text. How the text was cut into
pieces never changes the events. Text is passed on as soon as it can no longer be part of a marker.
Parsers never call the tokenizer: `lexicon` says how markers arrive.

All that a parser remembers is one struct of plain data, its `State`. So it can be serialised
between two pieces, and another process can continue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MethodType
from typing import Any, ClassVar, Self, cast

import msgspec

from gateway.formats.event_builder import BLANKS, DeclaredTool, EventBuilder, new_call_id
from gateway.formats.events import Event
from gateway.formats.grammar_builder import GrammarBuilder
from gateway.formats.lexicon import Lexicon, MarkerPart, MarkerToken, Piece
from gateway.text.markers import Scanner, ScannerState
from protocol.grammar import Form

NOTHING = ScannerState("")

BLOCK_CHARS = 4096
"""Text is read in blocks of at most this many characters. The text after a marker is copied, so
without blocks a long text full of markers would take quadratic time.
"""


class ParserContext(msgspec.Struct, frozen=True):
    """Constants that the parsers of one request share.

    tools   tools of the request; None: unknown, so any name is accepted
    new_id  makes an id for a call whose format brings none
    calls_or_text  the answer is calls or text, never both: nothing in a text is a call
    """

    lexicon: Lexicon
    tools: Sequence[DeclaredTool] | None = None
    new_id: Callable[[], str] = new_call_id
    calls_or_text: bool = False

    def event_builder(self, state: Mapping[str, Any] | None = None) -> EventBuilder:
        """Return a fresh builder for one choice, or one that continues from `state`."""
        return EventBuilder(self.tools, self.new_id, state)


class FormatParserState(msgspec.Struct):
    """Base of every parser's state: mutable plain data.

    at    current state; a subclass sets the first one as the default
    held  text that may be the beginning of a marker; the scanner keeps it while the parser runs
    done  the parser has ended, and the text that follows is not its to read
    """

    at: str = ""
    held: ScannerState = NOTHING
    done: bool = False


TextReader = Callable[[Any, str], str | None]
"""(parser, text) -> the text that it did not read, if any."""

Moves = Mapping[str, Sequence[tuple[Sequence[str], Callable[[str], None]]]]
"""State -> rows of (markers, the parser's method that handles them)."""


class FormatParser(ABC):
    """Base of all parsers. A subclass defines:

    State        its state, a struct derived from FormatParserState
    moves()      state -> rows of (markers, the method that handles them), in order of precedence;
                 states without markers may be left out
    UNSCANNED    states whose text is passed on without a search (a JSON value whose end is found
                 by its scanner); markers that are tokens are recognised there all the same
    TEXT         state -> the method that handles text that is certainly outside markers; in other
                 states text is dropped. It returns the part that it did not read (None: nothing),
                 which is read next in the state that it is in then. It must read some text, change
                 the state or be done
    on_marker    handles a marker of this state, by its row
    on_part      handles a `MarkerPart` in a state whose text is not searched; by default it has no
                 text there. Returns the part that it did not read
    on_stray     handles a marker token that is not in this state's table; by default it is dropped
    on_end       handles the end. `complete`: the model ended by itself and was not cut off

    Events go to its `builder`.
    """

    State: ClassVar[type[FormatParserState]]
    TEXT: ClassVar[Mapping[str, TextReader]] = {}
    UNSCANNED: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> None:
        self.context = context
        self.builder = builder
        self.s = self._memory(state)
        self._table: dict[str, tuple[str, ...]] = {}
        self._handlers: dict[str, dict[str, Callable[[FormatParser, str], None]]] = {}
        for at, rows in self.moves().items():
            found = [
                (marker, cast(MethodType, handler).__func__)  # bound, it would make a cycle
                for markers, handler in rows
                for marker in markers
            ]
            self._table[at] = tuple(marker for marker, _ in found)
            self._handlers[at] = dict(reversed(found))  # of two rows the first wins
        self._scanner: Scanner | None = None
        self._scans = ""  # the state that `_scanner` was made for
        self._make_scanner(self.s.held)
        self.s.held = NOTHING

    def _memory(self, state: Mapping[str, Any] | None) -> Any:
        return self.State() if state is None else msgspec.convert(state, self.State)

    # ---- what a subclass defines

    @abstractmethod
    def moves(self) -> Moves: ...

    def on_text(self, text: str) -> str:
        reader = self.TEXT.get(self.s.at)
        return (reader(self, text) or "") if reader else ""

    def on_marker(self, marker: str) -> None:
        self._handlers[self.s.at][marker](self, marker)

    def on_part(self, part: MarkerPart) -> str:
        return ""

    def on_stray(self, marker: str) -> None:  # noqa: B027  (few formats care)
        """Drop the marker."""

    def on_end(self, complete: bool) -> None:  # noqa: B027  (few formats care)
        """Do nothing."""

    # ---- for callers

    def push(self, piece: Piece) -> list[Event]:
        """Return the events that `piece` makes certain."""
        self.read(piece)
        return self.builder.drain()

    def finish(self, complete: bool = True) -> list[Event]:
        """Return the remaining events.

        An answer that was cut off (`complete` is false) may end inside a marker, which is not shown
        then: markup is not content.
        """
        self.end(complete)
        return self.builder.drain()

    def state(self) -> dict[str, Any]:
        """Return plain data, from which a parser of this class can continue."""
        data: dict[str, Any] = msgspec.to_builtins(self.s)
        data["held"] = msgspec.to_builtins(self._scanner.state() if self._scanner else NOTHING)
        return data

    # ---- readers of markers and of text, for the tables

    def skip(self, marker: str) -> None:  # noqa: B027  (a reader like any other)
        """Drop a marker without a meaning."""

    def as_content(self, text: str) -> None:
        self.builder.content(text)

    def as_arguments(self, text: str) -> None:
        self.builder.arguments_delta(text)

    # ---- reading, also for parsers made of parsers

    def read(self, piece: Piece) -> str:
        """Read like `push`, but leave the events with the builder. Return the unread text once
        done.
        """
        if isinstance(piece, MarkerToken):
            self.read_token(piece.text)
            return ""
        if isinstance(piece, MarkerPart):
            return self._read_part(piece)
        if len(piece) <= BLOCK_CHARS:
            return self._read_text(piece)
        for start in range(0, len(piece), BLOCK_CHARS):
            rest = self._read_text(piece[start : start + BLOCK_CHARS])
            if self.s.done:
                return rest + piece[start + BLOCK_CHARS :]
        return ""

    def read_token(self, marker: str) -> None:
        """Read a marker that is one token. Text held before it cannot become a marker any more."""
        self._release_held()
        if marker in self._table.get(self.s.at, ()):
            self.on_marker(marker)
        else:
            self.on_stray(marker)
        self._update_scanner()

    def end(self, complete: bool) -> None:
        if complete:
            self._release_held()
        self.on_end(complete)

    def _read_text(self, text: str) -> str:
        while text and not self.s.done:
            text = self._step(text, final=False)
        return text

    def _read_part(self, part: MarkerPart) -> str:
        if self._scanner is not None:
            return self._read_text(self._step(part.text, final=False, part=True))
        rest = self.on_part(part)
        self._update_scanner()
        return self._read_text(rest)

    def _release_held(self) -> None:
        """Release held text: nothing can continue it."""
        text = ""
        while not self.s.done and (text or (self._scanner and self._scanner.state().held)):
            text = self._step(text, final=True)

    def _step(self, text: str, *, final: bool, part: bool = False) -> str:
        """Read up to the next marker or change of state. Return the text that is left."""
        scanner = self._scanner
        if scanner is None:
            rest = self.on_text(text)
            self._update_scanner()
            return rest
        at = self.s.at
        certain, marker, rest = scanner.next(text, final=final, part=part)
        if certain:
            unread = self.on_text(certain)
            if unread or self.s.at != at or self.s.done:
                held = scanner.state().held if marker is None else marker
                self._make_scanner(NOTHING)
                return unread + held + rest
        if marker is not None:
            self.on_marker(marker)
            self._update_scanner()
        return rest

    def _update_scanner(self) -> None:
        """Make the scanner for the current state, if the state has changed. Nothing may be held."""
        if self._scans != self.s.at:
            self._make_scanner(NOTHING)

    def _make_scanner(self, held: ScannerState) -> None:
        at = self._scans = self.s.at
        markers = () if at in self.UNSCANNED else self._table.get(at, ())
        automaton = self.context.lexicon.automaton(markers)
        self._scanner = Scanner(automaton, held) if automaton else None


class CallParserState(FormatParserState):
    """Base of the states of call parsers.

    raw  text read but not emitted: until a call is certain, it may have to become content
    """

    raw: list[str] = []


NO_CALL = "the marker of tool calls without a call after it"
UNFINISHED_CALL = "a tool call that is not finished"


class CallParser(FormatParser):
    """Parser of one group of tool calls, entered by `open` and left when it is `done`.

    One parser may be opened any number of times; `open` resets it.

    syntax   the description that it reads by; a subclass declares its type
    BETWEEN  states in which all calls so far are complete, and another may follow
    """

    syntax: Any
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
        """Start after the opening `marker`. State of an earlier group is discarded."""
        self.s = self.State()
        self.on_open(marker)
        self._make_scanner(NOTHING)

    def on_open(self, marker: str) -> None:
        self.s.raw = [marker]

    def fast_event(self, text: str) -> Event | None:
        """Return the event for `text` if it changes no state, else None. A shortcut for long
        arguments.
        """
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
        """Return text that the state holds besides `raw`."""
        return []

    # ---- for subclasses

    def keep(self, text: str) -> None:
        """Keep text until a call is emitted: it may have to become content."""
        if self.s.raw and text:
            self.s.raw.append(text)

    def reject(self, why: str) -> None:
        """Emit the text kept so far as content, with a warning: it is not a call after all.

        There is no warning if the text has another form, which may begin like a call.
        """
        text, self.s.raw = "".join(self.s.raw), []
        if self.context.calls_or_text:
            self.builder.content(text)
        else:
            self.builder.reject_call(text, why)

    def outside_calls(self, text: str) -> str:
        """Skip blanks between calls. Other text means that there is no call, or is an error."""
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
        """Emit text unchanged where it stands."""
        if self.builder.is_open:
            self.builder.arguments_delta(text)
        elif self.s.raw:
            self.s.raw.append(text)
        else:
            self.builder.content(text)


class AnswerParser(FormatParser):
    """Base of the parsers of a whole answer. In the state "calls", `call_parser` reads the text.

    A subclass defines `begin`, which enters the first state, and `on_calls_done`.
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
            self.begin(starts_inside)
            self._update_scanner()

    def call_syntax(self) -> CallSyntax | None:
        """Return the syntax of calls that has a parser of its own, if there is one."""
        return None

    def call_context(self, context: ParserContext) -> ParserContext:
        return context

    @abstractmethod
    def begin(self, starts_inside: bool) -> None:
        """Enter the first state. `starts_inside`: the prompt has already opened the reasoning."""

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


class Syntax(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the descriptions of formats: markers and options, as data.

    The parser reads by it and the grammar is written from it. A subclass overrides the methods that
    raise NotImplementedError; a Struct cannot have abstract methods. Methods that write raise
    NotWritable for a tool that the syntax cannot write.
    """

    def markers(self) -> tuple[str, ...]:
        """Return every marker that a vocabulary may have as one token."""
        raise NotImplementedError

    def fitted(self, vocabulary: Collection[str]) -> Self:
        """Return the same format as a checkpoint with these added tokens writes it."""
        return self


class CallSyntax(Syntax, frozen=True, kw_only=True):
    """A syntax of tool calls in groups between content: the usual case."""

    PARSER: ClassVar[type[CallParser]]

    def openers(self) -> tuple[str, ...]:
        """Return the markers that open a group anywhere in content. If two match at one place,
        the first wins.
        """
        raise NotImplementedError

    def start_openers(self) -> tuple[str, ...]:
        """Return the openers that open a group only if nothing but blanks came before.

        They are always matched as text, and are part of the text that becomes content if there is
        no call.
        """
        return ()

    def bound_marker(self, opener: str) -> str:
        """Return the marker that must follow the opener, or ""."""
        return ""

    def call_id(self, ours: str) -> str:
        """Return an id in this format's form, for a call to which the model gave none."""
        return ours

    def call_parser(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        return self.PARSER(self, context, builder, state)

    def write_calls(self, opener: str, grammar: GrammarBuilder) -> Form:
        """Return the form of everything after the opener, including the marker that closes the
        calls.

        With `grammar.many` it admits as many calls as the syntax writes in one group, otherwise
        exactly one. The parser reads all that the form admits without a warning.
        """
        raise NotImplementedError

    def write_values(self, grammar: GrammarBuilder) -> Form | None:
        """Return the form of calls for an answer that may be other JSON instead, if calls without
        a marker look like any JSON.
        """
        return None


class AnswerFrame(msgspec.Struct, frozen=True):
    """Markup around the reasoning and around the answer proper.

    opens, closes  stand around a block of reasoning; `closes` includes all markup up to the next
                   part of the answer. "" if there is no reasoning, or if only the prompt opens it
    before, after  stand around content. The marker that ends the whole answer is not included
    """

    opens: str = ""
    closes: str = ""
    before: str = ""
    after: str = ""


class AnswerSyntax(Syntax, frozen=True, kw_only=True):
    """A format that covers the whole answer: content, reasoning and calls are one grammar.

    The grammar starts where the prompt or the reasoning ends.
    """

    PARSER: ClassVar[type[AnswerParser]]

    @property
    def frames_content(self) -> bool:
        """Whether content stands between markers of its own."""
        return True

    def parser(
        self,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> FormatParser:
        """Return a parser. `starts_inside`: the prompt has already opened the reasoning."""
        return self.PARSER(self, context, builder, state, starts_inside=starts_inside)

    def frame(self) -> AnswerFrame:
        raise NotImplementedError

    def write_required(self, grammar: GrammarBuilder) -> Form:
        """Return the form of calls and nothing else."""
        raise NotImplementedError

    def write_strict(self, grammar: GrammarBuilder) -> Form:
        """Return the form of messages of any kind, in which every call is one of the tools'."""
        raise NotImplementedError
