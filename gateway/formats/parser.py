"""Base of all format parsers: pieces of output go in, events come out.

A parser is a state machine, described by tables. In each state it searches for the markers that the
table lists for that state. It calls `on_text` and `on_marker` in the order of the text. The events
do not depend on how the text was cut into pieces. Text is passed on as soon as it can no longer be
part of a marker. Parsers never call the tokenizer; `lexicon` describes how markers arrive.

All data that a parser stores between two pieces is one struct, its `State`. It can be serialised,
so that another process can continue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import MethodType
from typing import Any, ClassVar, Self, cast

import msgspec

from gateway.formats.event_builder import BLANKS, DeclaredTool, EventBuilder, new_call_id
from gateway.formats.events import Event
from gateway.formats.grammar_builder import AnswerFrame, GrammarBuilder
from gateway.formats.lexicon import Lexicon, MarkerPart, MarkerToken, Piece
from gateway.text.markers import Scanner, ScannerState
from protocol.grammar import Form

NOTHING = ScannerState("")

BLOCK_CHARS = 4096
"""Text is read in blocks of at most this many characters. Reading a marker copies the rest of its
block. Without blocks, a long text full of markers would take quadratic time.
"""


class ParserContext(msgspec.Struct, frozen=True):
    """Constants that the parsers of one request share.

    tools          tools of the request; if None, any tool name is accepted
    new_id         makes an id for a call to which the model gave none
    calls_or_text  whether an answer is either calls or text, never both; in a text, nothing is then
                   parsed as a call
    """

    lexicon: Lexicon
    tools: Sequence[DeclaredTool] | None = None
    new_id: Callable[[], str] = new_call_id
    calls_or_text: bool = False

    def event_builder(self, state: Mapping[str, Any] | None = None) -> EventBuilder:
        """Return a new builder for one choice, or one that continues from `state`."""
        return EventBuilder(self.tools, self.new_id, state)


class FormatParserState(msgspec.Struct):
    """Base of every parser's state: mutable plain data.

    at    name of the current state; a subclass sets the first one as the default
    held  text that may be the start of a marker. While the parser runs, its scanner holds this text
    done  whether the parser has ended; text that follows belongs to its caller
    """

    at: str = ""
    held: ScannerState = NOTHING
    done: bool = False


TextReader = Callable[[Any, str], str | None]
"""Method of a parser that handles text. It returns the text that it did not read, if there is any.
"""

Handler = Callable[["FormatParser", str], None]
Moves = Mapping[str, Sequence[tuple[Sequence[str], Callable[[str], None]]]]
"""State -> rows of (markers, the method that handles these markers)."""


class FormatParser(ABC):
    """Base of all parsers. Events go to its `builder`.

    A subclass defines:

    State      its state, a struct derived from FormatParserState
    moves()    returns state -> rows of (markers, the method that handles them). An earlier row
               wins. States without markers may be left out
    UNSCANNED  states in which text is not searched for markers, such as a JSON value whose end a
               scanner finds. Markers that are tokens are recognised there all the same
    TEXT       state -> the method that handles text outside markers; without one, text is dropped.
               The method returns the text that it did not read, or None. That text is read next, in
               the state that is then current, so the method must read some text, change the state
               or set `done`
    on_part    handles a `MarkerPart` in a state without a search, and returns the text that it did
               not read. By default the part has no text
    on_stray   handles a marker token that the table does not list for this state
    on_end     handles the end. `complete` is true if the model ended by itself and was not cut off
    """

    State: ClassVar[type[FormatParserState]]
    #: The syntax that the parser reads; a subclass declares its type.
    syntax: Any = None
    TEXT: ClassVar[Mapping[str, TextReader]] = {}
    UNSCANNED: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> None:
        self.context = context
        self.builder = builder
        self.s = self._memory(state)
        key = type(self), self.moves_key()
        self._handlers = self._handler_table(key)
        self._automata = context.lexicon.automata.setdefault(key, {})
        self._scanner: Scanner | None = None
        self._scans = ""  # the state that `_scanner` was made for
        self._make_scanner(self.s.held)
        self.s.held = NOTHING

    def _memory(self, state: Mapping[str, Any] | None) -> Any:
        return self.State() if state is None else msgspec.convert(state, self.State)

    def _handler_table(self, key: Hashable) -> Mapping[str, Mapping[str, Handler]]:
        """Return state -> marker -> handler. All parsers with this key share the cached table."""
        tables = self.context.lexicon.tables
        if key not in tables:
            table: dict[str, dict[str, Handler]] = {}
            for at, rows in self.moves().items():
                handlers = table[at] = {}
                for markers, method in rows:
                    shared = cast(MethodType, method).__func__  # not bound to this parser
                    for marker in markers:
                        handlers.setdefault(marker, shared)
            tables[key] = table
        return tables[key]

    # ---- what a subclass defines

    @abstractmethod
    def moves(self) -> Moves: ...

    def moves_key(self) -> Hashable:
        """Return a key that changes whenever `moves` does. Parsers with the same key and lexicon
        share one table."""
        key: Hashable = self.syntax
        return key

    def on_text(self, text: str) -> str:
        reader = self.TEXT.get(self.s.at)
        return (reader(self, text) or "") if reader else ""

    def on_marker(self, marker: str) -> None:
        self._handlers[self.s.at][marker](self, marker)

    def on_part(self, part: MarkerPart) -> str:
        return ""

    def on_stray(self, marker: str) -> None:  # noqa: B027  (few formats care)
        """Handle a marker token that has no meaning in this state. By default it is dropped."""

    def on_end(self, complete: bool) -> None:  # noqa: B027  (few formats care)
        """Handle the end of the answer; by default nothing is left to do."""

    # ---- for callers

    def push(self, piece: Piece) -> list[Event]:
        """Read `piece`. Return the events that are certain now."""
        self.read(piece)
        return self.builder.drain()

    def finish(self, complete: bool = True) -> list[Event]:
        """Return the remaining events. If the answer was cut off (`complete` is false), it may end
        inside a marker. That part of a marker is dropped, because markup is not content."""
        self.end(complete)
        return self.builder.drain()

    def state(self) -> dict[str, Any]:
        """Return the state as plain data, from which another parser of this class can continue."""
        data: dict[str, Any] = msgspec.to_builtins(self.s)
        data["held"] = msgspec.to_builtins(self._scanner.state() if self._scanner else NOTHING)
        return data

    # ---- handlers of markers and of text, for the tables

    def skip(self, marker: str) -> None:  # noqa: B027  (a handler like any other)
        """Drop a marker that has no meaning."""

    def as_content(self, text: str) -> None:
        self.builder.content(text)

    def as_arguments(self, text: str) -> None:
        self.builder.arguments_delta(text)

    # ---- reading, also for parsers that contain other parsers

    def read(self, piece: Piece) -> str:
        """Read `piece` like `push`, but leave the events in the builder. Return the text that was
        not read because the parser is done."""
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
        """Read a marker that is one token. Text held before it can no longer become a marker."""
        self._release_held()
        if marker in self._handlers.get(self.s.at, ()):
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
        """Handle text that was held as a possible marker as ordinary text, because no text can
        follow it."""
        text = ""
        while not self.s.done and (text or (self._scanner and self._scanner.state().held)):
            text = self._step(text, final=True)

    def _step(self, text: str, *, final: bool, part: bool = False) -> str:
        """Read up to the next marker or change of state. Return the text that was not read."""
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
        """Make the scanner for the current state, if the state has changed. No text may be held."""
        if self._scans != self.s.at:
            self._make_scanner(NOTHING)

    def _make_scanner(self, held: ScannerState) -> None:
        at = self._scans = self.s.at
        if at not in self._automata:
            markers = () if at in self.UNSCANNED else tuple(self._handlers.get(at, ()))
            self._automata[at] = self.context.lexicon.automaton(markers)
        automaton = self._automata[at]
        self._scanner = Scanner(automaton, held) if automaton else None


class CallParserState(FormatParserState):
    """Base of the states of call parsers.

    raw  text read but not emitted, which becomes content if it is not the start of a call
    """

    raw: list[str] = []


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


class Syntax(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Base of the descriptions of formats: markers and options, as data.

    The parser and the grammar both follow this description. A subclass overrides the methods that
    raise NotImplementedError, because a Struct cannot have abstract methods. The `write_...`
    methods return grammars. They raise NotWritable for a tool that the syntax cannot write.
    """

    def markers(self) -> tuple[str, ...]:
        """Return every marker that a vocabulary may have as one token."""
        raise NotImplementedError

    def fitted(self, vocabulary: Collection[str]) -> Self:
        """Return this syntax with the markers that a checkpoint with these added tokens uses."""
        return self


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
