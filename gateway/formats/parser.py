"""Bases of all formats: the parser, which turns pieces of output into events, and the syntax.

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

from gateway.formats.event_builder import DeclaredTool, EventBuilder, new_call_id
from gateway.formats.events import Event
from gateway.formats.lexicon import Lexicon, MarkerPart, MarkerToken, Piece
from gateway.text.markers import Scanner, ScannerState

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
