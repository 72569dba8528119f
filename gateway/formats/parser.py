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
"""Text is read in blocks of so many characters: what follows a marker is copied, so without blocks
a long text full of markers would take quadratic time."""


class MarkerToken(msgspec.Struct, frozen=True, gc=False):
    """A marker of the active format, as the one token it is."""

    token_id: int
    text: str


class MarkerPart(msgspec.Struct, frozen=True, gc=False):
    """A special token that occurs in markers which are spelt out; no text anywhere else."""

    text: str


Piece = str | MarkerToken | MarkerPart


class Lexicon:
    """Which markers of a format are tokens, for one vocabulary; shared, as it only ever caches.

    tokens  token id -> marker
    parts   token id -> text, of the special tokens that occur in markers which are no tokens
    pieces  token id -> what it is to a machine, for both
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
        """Finds those of `markers` that are spelt out; None where there are none of that kind."""
        if markers not in self._sets:
            spelt = [marker for marker in markers if marker not in self._by_id]
            self._sets[markers] = MarkerSet(spelt) if spelt else None
        return self._sets[markers]


class ParserContext(msgspec.Struct, frozen=True):
    """What the machines of one request share, and never change.

    tools   what the request declared; None: nothing is known, so no name is unknown
    new_id  an id for a call whose format brings none
    calls_or_text  the answer is calls or text, never both: nothing in a text is a call
    """

    lexicon: Lexicon
    tools: Sequence[DeclaredTool] | None = None
    new_id: Callable[[], str] = new_call_id
    calls_or_text: bool = False

    def event_builder(self, state: Mapping[str, Any] | None = None) -> EventBuilder:
        """A fresh one, or one that goes on from `state`: one per choice."""
        return EventBuilder(self.tools, self.new_id, state)


class FormatParserState(msgspec.Struct):
    """Base of every machine's memory: mutable, of plain data.

    at    the state it is in; a subclass says where it begins
    held  read, but perhaps the beginning of a marker; kept by the scanner while the machine runs
    done  it reads no more: what follows is not its to read
    """

    at: str = ""
    held: ScannerState = NOTHING
    done: bool = False


class FormatParser(ABC):
    """Base of all machines. A subclass says:

    State        its memory, a struct derived from MachineState
    table()      state -> the markers looked for there, in order of precedence; a state without
                 markers may be left out
    UNSCANNED    states whose text is handed over unsearched (a JSON value that knows its own end);
                 markers that are tokens are recognised there all the same
    on_text      text that is certainly outside markers. Returns what it did not read, which is read
                 next in the state that it is in then; it must have read some, changed the state or
                 be done
    on_marker    a marker of this state's table
    on_part      a `MarkerPart` in a state whose text is not searched; by default it has none there.
                 Returns what it did not read
    on_stray     a marker token that is not in this state's table; it is markup that means nothing
                 here, so by default it is dropped
    on_end       nothing more will come. `complete`: the model has ended by itself, and was not cut
                 off

    What it has to say it tells its `teller`.
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
        self._enter(self.s.held)
        self.s.held = NOTHING

    def _memory(self, state: Mapping[str, Any] | None) -> Any:
        return self.State() if state is None else msgspec.convert(state, self.State)

    # ---- what a subclass says

    @abstractmethod
    def table(self) -> Mapping[str, tuple[str, ...]]: ...

    @abstractmethod
    def on_text(self, text: str) -> str: ...

    @abstractmethod
    def on_marker(self, marker: str) -> None: ...

    def on_part(self, part: MarkerPart) -> str:
        return ""

    def on_stray(self, marker: str) -> None:  # noqa: B027  (few formats care)
        """Dropped."""

    def on_end(self, complete: bool) -> None:  # noqa: B027  (few formats care)
        """Nothing to do."""

    # ---- what everyone else calls

    def push(self, piece: Piece) -> list[Event]:
        """What `piece` makes certain."""
        self.read(piece)
        return self.builder.drain()

    def finish(self, complete: bool = True) -> list[Event]:
        """The rest. An answer that was cut off (`complete` is false) may end inside a marker, which
        is then not shown: markup is no content."""
        self.end(complete)
        return self.builder.drain()

    def state(self) -> dict[str, Any]:
        """Plain data, from which a machine of this class goes on."""
        data: dict[str, Any] = msgspec.to_builtins(self.s)
        data["held"] = msgspec.to_builtins(self._scanner.state() if self._scanner else NOTHING)
        return data

    # ---- reading, also for machines made of machines

    def read(self, piece: Piece) -> str:
        """Like `push`, but events stay with the teller. Returns what was not read, once done."""
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
        """A marker that is one token. What was held before it cannot grow any more."""
        self._settle()
        if marker in self._table.get(self.s.at, ()):
            self.on_marker(marker)
        else:
            self.on_stray(marker)
        self._follow()

    def end(self, complete: bool) -> None:
        if complete:
            self._settle()
        self.on_end(complete)

    def _read_text(self, text: str) -> str:
        while text and not self.s.done:
            text = self._step(text, final=False)
        return text

    def _read_part(self, part: MarkerPart) -> str:
        if self._scanner is not None:
            return self._read_text(self._step(part.text, final=False, part=True))
        rest = self.on_part(part)
        self._follow()
        return self._read_text(rest)

    def _settle(self) -> None:
        """Nothing can continue the text so far: what is held is what it is."""
        text = ""
        while not self.s.done and (text or (self._scanner and self._scanner.state().held)):
            text = self._step(text, final=True)

    def _step(self, text: str, *, final: bool, part: bool = False) -> str:
        """Read on up to the next marker or change of state; returns what is left to read."""
        scanner = self._scanner
        if scanner is None:
            rest = self.on_text(text)
            self._follow()
            return rest
        at = self.s.at
        certain, marker, rest = scanner.next(text, final=final, part=part)
        if certain:
            unread = self.on_text(certain)
            if unread or self.s.at != at or self.s.done:
                held = scanner.state().held if marker is None else marker
                self._enter(NOTHING)
                return unread + held + rest
        if marker is not None:
            self.on_marker(marker)
            self._follow()
        return rest

    def _follow(self) -> None:
        """The state may have changed, with nothing held: look for what is looked for there."""
        if self._scans != self.s.at:
            self._enter(NOTHING)

    def _enter(self, held: ScannerState) -> None:
        at = self._scans = self.s.at
        markers = () if at in self.UNSCANNED else self._table.get(at, ())
        automaton = self.context.lexicon.automaton(markers)
        self._scanner = Scanner(automaton, held) if automaton else None


class CallParser(FormatParser):
    """A machine for one stretch of tool calls, entered by `open` and left when it is `done`.

    One section may be opened any number of times; `open` begins anew.

    syntax   the description that it reads by; a subclass names its kind
    BETWEEN  states in which all calls so far are complete, and another may follow

    Where its State has `raw`, a list of strings, that is what was read and not told: until a call
    is certain, it may have to be given back.
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
        """`marker` has opened it. All that an earlier stretch left is forgotten."""
        self.s = self.State()
        self.on_open(marker)
        self._enter(NOTHING)

    @abstractmethod
    def on_open(self, marker: str) -> None: ...

    def more(self, text: str) -> Event | None:
        """What `text` is told as, where it changes nothing that is remembered; None where it has to
        be read. A shortcut, for syntaxes whose arguments are worth one."""
        return None

    def _give_back(self, why: str) -> None:
        """What was read is no call after all: it is content, with a warning. There is nothing to
        warn of if the text has a form, which may begin like a call."""
        text = "".join(self.s.raw)
        if self.context.calls_or_text:
            self.builder.content(text)
        else:
            self.builder.reject_call(text, why)
        self.s.raw = []


class Syntax(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the descriptions of formats: markers and options, as data, from which the machine
    reads and the grammar is built. What raises NotImplementedError a subclass has to say: a Struct
    cannot have abstract methods."""

    def markers(self) -> tuple[str, ...]:
        """Every marker that a vocabulary may have as one token."""
        raise NotImplementedError

    def fitted(self, vocabulary: Collection[str]) -> Self:
        """The same format as a checkpoint with these added tokens writes it."""
        return self


class CallSyntax(Syntax, frozen=True, kw_only=True):
    """Tool calls in stretches between content: the usual case."""

    def openers(self) -> tuple[str, ...]:
        """Each opens a section, wherever it stands in the content. Of two at one place the first
        wins."""
        raise NotImplementedError

    def start_openers(self) -> tuple[str, ...]:
        """These open a section only where nothing but blanks has been said before. They are always
        looked for as text, and are part of what the section has to give back if it is no call."""
        return ()

    def call_id(self, ours: str) -> str:
        """The id of a call to which the model gave none, in this format's form."""
        return ours

    def call_parser(
        self, context: ParserContext, builder: EventBuilder, state: Mapping[str, Any] | None = None
    ) -> CallParser:
        raise NotImplementedError


class AnswerSyntax(Syntax, frozen=True, kw_only=True):
    """A format that rules the whole answer: content, reasoning and calls are one grammar."""

    @property
    def frames_content(self) -> bool:
        """Content stands between markers of its own."""
        return True

    def parser(
        self,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        starts_inside: bool = False,
    ) -> FormatParser:
        """starts_inside  the prompt has already opened the reasoning"""
        raise NotImplementedError


def tokens_of(markers: Iterable[str], token_id: Callable[[str], int | None]) -> dict[int, str]:
    """token id -> marker, of those that are tokens."""
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
