"""Parser of the usual answer: content, blocks of reasoning between markers, groups of tool calls.

    start       only blanks so far, or only blanks since the reasoning
    content     text
    wrapped     text between the markers that some models put around their answer
    header      the recipient of a message; not content, up to the next marker
    opening     reasoning has started, and has no text yet
    reasoning   reasoning text
    calls       the tool syntax's own parser reads until it is done

Reasoning may come again after content, if the format allows it. Inside a group of calls only the
tool syntax reads, so markers of reasoning have no meaning there. A marker token without a meaning
is dropped from content. In reasoning it is text, because a model may discuss markup there.

A model may forget to close its reasoning and call a tool inside it. So a marker of calls in
reasoning starts a trial: the tool syntax reads on, and if it finds the name of a tool of the
request, this is a call. Otherwise the marker was text, and the text after it is read again as
reasoning. A trial holds back at most MAX_TRIAL_CHARS. After such a call the reasoning continues
until it is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.formats.event_builder import BuilderCheckpoint, EventBuilder
from gateway.formats.events import Content, Event, Reasoning, ToolCall
from gateway.formats.parser import (
    CallParser,
    CallSyntax,
    FormatParser,
    FormatParserState,
    MarkerPart,
    ParserContext,
    Piece,
)
from gateway.formats.reasoning import NO_REASONING, ReasoningFormat

START, CONTENT, WRAPPED, HEADER = "start", "content", "wrapped", "header"
OPENING, REASONING, CALLS = "opening", "reasoning", "calls"


MAX_HEADER_CHARS = 128
"""Longer text is not a header."""

MAX_TRIAL_CHARS = 1024
MAX_TRIAL_TOKENS = 8
"""A call in reasoning must name its tool within this many characters and marker tokens."""

TEXT, TOKEN, PART = "text", "token", "part"
TrialPiece = tuple[str, str]
"""A piece of the answer as plain data: one of these three kinds, and its text."""


class StandardParserState(FormatParserState):
    """State of a `StandardParser`.

    thoughts  all reasoning so far, kept only if it may have to be repeated as content
    heading   the header so far
    marked    a marker has been seen; a text without any marker has no header either
    inside    the current group of calls stands in reasoning
    opener    the marker that started a trial; "" outside of one
    trial     the pieces after it, which may have to be read again
    """

    at: str = START
    thoughts: list[str] = []
    heading: str = ""
    marked: bool = False
    inside: bool = False
    opener: str = ""
    trial: list[TrialPiece] = []


class StandardParser(FormatParser):
    """See the module. `starts_inside`: the prompt has already opened the reasoning."""

    State = StandardParserState
    UNSCANNED = frozenset({CALLS})

    def __init__(
        self,
        context: ParserContext,
        builder: EventBuilder,
        state: Mapping[str, Any] | None = None,
        *,
        reasoning: ReasoningFormat | None = None,
        tools: CallSyntax | None = None,
        starts_inside: bool = False,
    ) -> None:
        self.reasoning = reasoning or NO_REASONING
        self.tools = tools
        self._again: list[TrialPiece] = []  # to be read again; empty between two pushes
        own = dict(state or {})
        inner = own.pop("section", None)
        self.call_parser: CallParser | None = (
            tools.call_parser(context, builder, inner) if tools else None
        )
        super().__init__(context, builder, own or None)
        if state is None:
            self._begin(starts_inside)

    def _begin(self, starts_inside: bool) -> None:
        if self.reasoning.prefix:
            self.builder.content(self.reasoning.prefix)
        if starts_inside and self.reasoning.close:
            self._open_reasoning()
        elif self.reasoning.header:
            self.s.at = HEADER
        self._update_scanner()

    def state(self) -> dict[str, Any]:
        return super().state() | {"section": self.call_parser.state() if self.call_parser else None}

    def table(self) -> Mapping[str, tuple[str, ...]]:
        reasoning = self.reasoning
        calls = self.tools.openers() if self.tools else ()
        first = self.tools.start_openers() if self.tools else ()
        later = () if self.context.calls_or_text else calls
        again = () if reasoning.only_at_start else reasoning.open
        ends = reasoning.close + (() if reasoning.drafts_calls else calls)
        wrap = reasoning.wrap_open if reasoning.header else ()
        between = reasoning.header + reasoning.ignored
        return {
            START: reasoning.open + reasoning.wrap_open + between + calls + first,
            CONTENT: again + wrap + between + later,
            WRAPPED: again + reasoning.wrap_close + between + later,
            HEADER: reasoning.open + wrap + between + calls,
            OPENING: reasoning.open + reasoning.label + ends,
            REASONING: ends,
        }

    def push(self, piece: Piece) -> list[Event]:
        """Like `FormatParser.push`, with a shortcut for the most common piece: more of the same."""
        if type(piece) is str and piece:
            event = self._fast_event(piece)
            if event is not None:
                return [event]
        return super().push(piece)

    def _fast_event(self, text: str) -> Event | None:
        """Return the event for `text` if it changes no state, else None."""
        at, scanner = self.s.at, self._scanner
        if at == CALLS:
            assert self.call_parser is not None
            return self.call_parser.fast_event(text)
        if scanner is not None and not scanner.lets_through(text):
            return None
        if at == CONTENT and self.builder.passes_content(text):
            return Content(text)
        is_told_as_it_comes = at == REASONING and not self.reasoning.force_content
        return (
            Reasoning(text) if is_told_as_it_comes and self.builder.passes_reasoning(text) else None
        )

    # ---- transitions

    def on_text(self, text: str) -> str:
        match self.s.at:
            case "calls":
                return self._read_calls(text)
            case "content" | "wrapped":
                self.builder.content(text)
            case "reasoning":
                self._add_reasoning(text)
            case "header":
                self._in_header(text)
            case at:
                return self._first(text, CONTENT if at == START else REASONING)
        return ""

    def _first(self, text: str, then: str) -> str:
        """Read leading blanks. Any other text is read in the state `then`."""
        if not text.isspace():
            self.s.at = then
            return text
        if then == CONTENT:
            self.builder.content(text)
        else:
            self._add_reasoning(text)
        return ""

    def _add_reasoning(self, text: str) -> None:
        self.builder.reasoning(text)
        if self.reasoning.force_content:
            self.s.thoughts.append(text)

    def on_marker(self, marker: str) -> None:
        reasoning = self.reasoning
        self.s.marked = True
        match self.s.at:
            case "opening" if marker in reasoning.label:
                self.s.at = REASONING
            case "opening" if marker in reasoning.open:
                pass
            case "opening" | "reasoning" if marker in reasoning.close:
                self._close_reasoning()
            case "opening" | "reasoning" if reasoning.calls_end_it:
                self._close_reasoning()
                self._open_calls(marker)
            case "opening" | "reasoning":
                self._open_trial(marker)
            case _:
                self._between(marker)

    def _between(self, marker: str) -> None:
        """Handle a marker outside reasoning and calls."""
        reasoning = self.reasoning
        match self.s.at:
            case _ if marker in reasoning.open:
                self._open_reasoning()
            case _ if marker in reasoning.wrap_open:
                self._mark(WRAPPED)
            case _ if marker in reasoning.header:
                self._mark(HEADER)
                self.s.heading = ""
            case _ if marker in reasoning.wrap_close:
                self._mark(CONTENT)
            case at if marker in reasoning.ignored:
                self._mark(at)
            case _:
                self._open_calls(marker)

    def on_stray(self, marker: str) -> None:
        match self.s.at:
            case "calls":
                self._read_call_token(marker)
            case "opening" | "reasoning" if marker not in self.reasoning.open:
                self._add_reasoning(marker)

    def _in_header(self, text: str) -> None:
        s = self.s
        s.heading += text
        if len(s.heading) > MAX_HEADER_CHARS:
            s.at = CONTENT
            self.builder.content(s.heading)

    def _mark(self, then: str) -> None:
        self.builder.markup()
        self.s.at = then

    def _open_reasoning(self) -> None:
        self.builder.start_reasoning()
        self.s.at = OPENING

    def _close_reasoning(self) -> None:
        self.builder.end_reasoning()
        self.s.at = START

    # ---- tool calls

    def _open_calls(self, marker: str) -> None:
        assert self.call_parser is not None
        self.s.at = CALLS
        self.call_parser.open(marker)
        self._leave_if_done()

    def on_part(self, part: MarkerPart) -> str:
        return self._read_calls(part) if self.s.at == CALLS else ""

    def _read_calls(self, piece: str | MarkerPart) -> str:
        assert self.call_parser is not None
        if self.s.opener:
            return self._try(piece)
        rest = self.call_parser.read(piece)
        self._leave_if_done()
        return rest

    def _read_call_token(self, marker: str) -> None:
        """Pass a marker token to the call parser, unless reasoning starts or ends between two
        calls.
        """
        assert self.call_parser is not None
        s, reasoning = self.s, self.reasoning
        if s.opener:
            self._try_token(marker)
        elif s.inside and marker in reasoning.close and self.call_parser.is_between:
            self.call_parser.end(True)
            s.inside = False
            self._close_reasoning()
        elif not s.inside and marker in reasoning.open and self.call_parser.is_between:
            self.call_parser.end(True)
            s.at = CONTENT
            self._between(marker)
        else:
            self.call_parser.read_token(marker)
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        assert self.call_parser is not None
        s = self.s
        if self.call_parser.s.done:
            more_calls = self.context.calls_or_text and self.builder.num_calls > 0
            s.at = REASONING if s.inside else START if more_calls else CONTENT
            if s.inside and self._closes_both():
                self._close_reasoning()
            s.inside = False

    def _closes_both(self) -> bool:
        """Return whether the marker that closes calls closes reasoning as well."""
        return self.tools is not None and not {*self.reasoning.close}.isdisjoint(
            self.tools.markers()
        )

    # ---- trials: a marker of calls in reasoning

    def _open_trial(self, marker: str) -> None:
        assert self.call_parser is not None
        s = self.s
        s.at, s.inside, s.opener, s.trial = CALLS, True, marker, []
        self.call_parser.open(marker)

    def _try(self, piece: str | MarkerPart) -> str:
        """Try `piece` as a call. Text is tried only up to the limit, so how it was cut does not
        matter.
        """
        assert self.call_parser is not None
        checkpoint = self.builder.checkpoint()
        if isinstance(piece, MarkerPart):
            rest, later = self.call_parser.read(piece), ""
            self._keep(PART, piece.text)
        else:
            room = MAX_TRIAL_CHARS - self._num_tried()
            now, later = piece[:room], piece[room:]
            rest = self.call_parser.read(now)
            self._keep(TEXT, now)
        if self._is_call(checkpoint):
            return rest + later
        if later:
            self._again.append((TEXT, later))
        return ""

    def _try_token(self, marker: str) -> None:
        assert self.call_parser is not None
        checkpoint = self.builder.checkpoint()
        if marker in self.reasoning.open + self.reasoning.close:  # in no call's head
            self._give_up(checkpoint)
            self._again.append((TOKEN, marker))
        else:
            self.call_parser.read_token(marker)
            self._keep(TOKEN, marker)
            self._is_call(checkpoint)

    def _keep(self, kind: str, text: str) -> None:
        trial = self.s.trial
        if kind == TEXT and trial and trial[-1][0] == TEXT:
            trial[-1] = (TEXT, trial[-1][1] + text)
        else:
            trial.append((kind, text))

    def _num_tried(self) -> int:
        return sum(len(text) for _, text in self.s.trial)

    def _is_call(self, checkpoint: BuilderCheckpoint) -> bool:
        """Return whether the trial is a call. The first event since the checkpoint decides, if
        there is one.
        """
        assert self.call_parser is not None
        s, emitted = self.s, self.builder.out[checkpoint.num_events :]
        if emitted and isinstance(emitted[0], ToolCall) and self.builder.declares(emitted[0].name):
            s.opener, s.trial = "", []
            self._leave_if_done()
            return True
        num_tokens = sum(kind != TEXT for kind, _ in s.trial)
        is_full = self._num_tried() >= MAX_TRIAL_CHARS or num_tokens >= MAX_TRIAL_TOKENS
        if emitted or self.call_parser.s.done or is_full:
            self._give_up(checkpoint)
        return False

    def _give_up(self, checkpoint: BuilderCheckpoint) -> None:
        """End the trial: the marker was text. The text after it is read again."""
        s = self.s
        self.builder.roll_back(checkpoint)
        opener, self._again = s.opener, s.trial
        s.at, s.inside, s.opener, s.trial = REASONING, False, "", []
        self._add_reasoning(opener)

    def _read_text(self, text: str) -> str:
        rest = super()._read_text(text)
        if self._again:
            self._read_again()
        return rest

    def read_token(self, marker: str) -> None:
        super().read_token(marker)
        if self._again:
            self._read_again()

    def _release_held(self) -> None:
        super()._release_held()
        while self._again:
            self._read_again()
            super()._release_held()

    def _read_again(self) -> None:
        """Read the pieces of a failed trial again. A second trial may return them once more."""
        self._update_scanner()
        while self._again:
            pieces, self._again = self._again, []
            for place, (kind, text) in enumerate(pieces, start=1):
                match kind:
                    case "text":
                        super()._read_text(text)
                    case "token":
                        super().read_token(text)
                    case _:
                        self._read_part(MarkerPart(text))
                if self._again:
                    self._again += pieces[place:]
                    break

    # ---- the end

    def on_end(self, complete: bool) -> None:
        is_ended = False
        while self.s.opener and not is_ended:
            is_ended = self._end_trial(complete)
        if self.s.at == CALLS and self.call_parser is not None and not is_ended:
            self.call_parser.end(complete)
        elif self.s.at in (OPENING, REASONING):
            self.builder.end_reasoning()
        elif self.s.at == HEADER and not self.s.marked:
            self.builder.content(self.s.heading)
        if self.reasoning.force_content and not self.builder.s.said:
            self.builder.content("".join(self.s.thoughts).strip())
        self.builder.finish()

    def _end_trial(self, complete: bool) -> bool:
        """Return whether the call parser has ended with the trial, because it was a call."""
        assert self.call_parser is not None
        s = self.s
        if not complete:  # perhaps the beginning of a call, so it is not shown
            s.at, s.inside, s.opener, s.trial = REASONING, False, "", []
            return False
        checkpoint = self.builder.checkpoint()
        self.call_parser.end(True)
        if self._is_call(checkpoint):
            return True
        if s.opener:
            self._give_up(checkpoint)
        self._release_held()
        return False
