"""Base of all format parsers: pieces in, events out, with states and markers as tables.

A parser is in one state at a time. In each state it looks for the markers that its table lists for
that state, and calls `on_text` and `on_marker` in the order of the text. How the text was cut into
pieces never changes the events. Text is passed on as soon as it can no longer be part of a marker.

A marker can arrive in three ways:

- If the vocabulary has it as one token, it arrives as a `MarkerToken` and is recognised by its id
  alone. The same letters spelt by other tokens are text.
- If it is several ordinary tokens, `markers.Scanner` finds it in the text.
- A special token that occurs in such a spelt-out marker arrives as a `MarkerPart`. It has text
  inside a marker and none outside. Parsers never call the tokenizer.

All that a parser remembers is one struct of plain data, its `State`. So it can be serialised
between two pieces, and another process can continue.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import msgspec

from gateway.formats.event_builder import DeclaredTool, EventBuilder, new_call_id
from gateway.formats.events import Event
from gateway.text.markers import MarkerSet, Scanner, ScannerState

NOTHING = ScannerState("")

BLOCK_CHARS = 4096
"""Text is read in blocks of at most this many characters. The text after a marker is copied, so
without blocks a long text full of markers would take quadratic time.
"""


class MarkerToken(msgspec.Struct, frozen=True, gc=False):
    """A marker of the active format that is one token."""

    token_id: int
    text: str


class MarkerPart(msgspec.Struct, frozen=True, gc=False):
    """A special token that occurs in spelt-out markers. It has no text anywhere else."""

    text: str


Piece = str | MarkerToken | MarkerPart


class Lexicon:
    """The markers of a format that are tokens of one vocabulary. Shared, as it only caches.

    tokens  token id -> marker
    parts   token id -> text, for special tokens that occur in markers which are not tokens
    pieces  token id -> the parser's input for it, for both
    """

    def __init__(
        self, tokens: Mapping[int, str] | None = None, parts: Mapping[int, str] | None = None
    ) -> None:
        self.tokens = dict(tokens or {})
        self.parts = dict(parts or {})
        self.pieces: dict[int, Piece] = {
            **{token: MarkerPart(text) for token, text in self.parts.items()},
            **{token: MarkerToken(token, marker) for token, marker in self.tokens.items()},
        }
        self._by_id = frozenset(self.tokens.values())
        self._sets: dict[tuple[str, ...], MarkerSet | None] = {}

    def is_token(self, marker: str) -> bool:
        return marker in self._by_id

    def automaton(self, markers: tuple[str, ...]) -> MarkerSet | None:
        """Return a matcher for the spelt-out ones of `markers`, or None if there are none."""
        if markers not in self._sets:
            spelt = [marker for marker in markers if marker not in self._by_id]
            self._sets[markers] = MarkerSet(spelt) if spelt else None
        return self._sets[markers]


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


class FormatParser(ABC):
    """Base of all parsers. A subclass defines:

    State        its state, a struct derived from FormatParserState
    table()      state -> the markers to look for, in order of precedence; states without markers
                 may be left out
    UNSCANNED    states whose text is passed on without a search (a JSON value whose end is found
                 by its scanner); markers that are tokens are recognised there all the same
    on_text      handles text that is certainly outside markers. Returns the part that it did not
                 read, which is read next in the state that it is in then. It must read some text,
                 change the state or be done
    on_marker    handles a marker of this state's table
    on_part      handles a `MarkerPart` in a state whose text is not searched; by default it has no
                 text there. Returns the part that it did not read
    on_stray     handles a marker token that is not in this state's table; by default it is dropped
    on_end       handles the end. `complete`: the model ended by itself and was not cut off

    Events go to its `builder`.
    """

    State: ClassVar[type[FormatParserState]]
    UNSCANNED: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> None:
        self.context = context
        self.builder = builder
        self.s = self._memory(state)
        self._table = self.table()
        self._scanner: Scanner | None = None
        self._scans = ""  # the state that `_scanner` was made for
        self._make_scanner(self.s.held)
        self.s.held = NOTHING

    def _memory(self, state: Mapping[str, Any] | None) -> Any:
        return self.State() if state is None else msgspec.convert(state, self.State)

    # ---- what a subclass defines

    @abstractmethod
    def table(self) -> Mapping[str, tuple[str, ...]]: ...

    @abstractmethod
    def on_text(self, text: str) -> str: ...

    @abstractmethod
    def on_marker(self, marker: str) -> None: ...

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


class CallParser(FormatParser):
    """Parser of one group of tool calls, entered by `open` and left when it is `done`.

    One parser may be opened any number of times; `open` resets it.

    syntax   the description that it reads by; a subclass declares its type
    BETWEEN  states in which all calls so far are complete, and another may follow

    If its State has a list of strings `raw`, that is the text read but not emitted: until a call is
    certain, this text may have to become content.
    """

    syntax: CallSyntax
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

    @abstractmethod
    def on_open(self, marker: str) -> None: ...

    def fast_event(self, text: str) -> Event | None:
        """Return the event for `text` if it changes no state, else None. A shortcut for long
        arguments.
        """
        return None

    def _reject(self, why: str) -> None:
        """Emit the text read so far as content, with a warning: it is not a call after all.

        There is no warning if the text has another form, which may begin like a call.
        """
        text = "".join(self.s.raw)
        if self.context.calls_or_text:
            self.builder.content(text)
        else:
            self.builder.reject_call(text, why)
        self.s.raw = []


class Syntax(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the descriptions of formats: markers and options, as data.

    The parser reads by it and the grammar is built from it. A subclass overrides the methods that
    raise NotImplementedError; a Struct cannot have abstract methods.
    """

    def markers(self) -> tuple[str, ...]:
        """Return every marker that a vocabulary may have as one token."""
        raise NotImplementedError

    def fitted(self, vocabulary: Collection[str]) -> Self:
        """Return the same format as a checkpoint with these added tokens writes it."""
        return self


class CallSyntax(Syntax, frozen=True, kw_only=True):
    """A syntax of tool calls in groups between content: the usual case."""

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

    def call_id(self, ours: str) -> str:
        """Return an id in this format's form, for a call to which the model gave none."""
        return ours

    def call_parser(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        raise NotImplementedError


class AnswerSyntax(Syntax, frozen=True, kw_only=True):
    """A format that covers the whole answer: content, reasoning and calls are one grammar."""

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
        raise NotImplementedError


def tokens_of(markers: Iterable[str], token_id: Callable[[str], int | None]) -> dict[int, str]:
    """Return token id -> marker, for the markers that are tokens."""
    found = ((token_id(marker), marker) for marker in markers)
    return {token: marker for token, marker in found if token is not None}


# ---- markers with a suffix

SUFFIXED = re.compile(r"<(?:tool_calls?|think)(:[^\s<>]+)>")
"""A marker with a suffix that only the checkpoint's vocabulary has: `<tool_call:6124c78e>`."""


def marker_suffix(vocabulary: Iterable[str]) -> str:
    """Return the suffix of a vocabulary's markers with its colon, or "" if they have none."""
    return next((found[1] for token in vocabulary if (found := SUFFIXED.fullmatch(token))), "")


def suffixed_markers(text: str) -> list[str]:
    """Return the markers with a suffix in a text, such as a chat template."""
    return [found[0] for found in SUFFIXED.finditer(text)]


def with_suffix(marker: str, vocabulary: Collection[str]) -> str:
    """Return `marker`, which ends with ">", as a checkpoint with this vocabulary writes it.

    Most markers of such a checkpoint have the suffix. A marker that the vocabulary has only
    without the suffix is written without it.
    """
    longer = marker.removesuffix(">") + marker_suffix(vocabulary) + ">"
    return marker if marker in vocabulary and longer not in vocabulary else longer
