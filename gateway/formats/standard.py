"""Parser of most answers: content, blocks of reasoning between markers, groups of tool calls.

The states are:

    start       only blanks so far, or only blanks since the reasoning
    content     in text
    wrapped     in text between the markers that some models put around their answer
    header      in a message's header, which lasts up to the next marker and is not content
    opening     in a block of reasoning, before its first text
    reasoning   in a block of reasoning
    calls       in a group of calls: the call parser reads until it is done

Reasoning may start again after content, if the format allows it. Inside a group of calls only the
call parser reads, so markers of reasoning have no meaning there. A marker token without a meaning
is dropped from content. In reasoning it is kept as text, because a model may discuss markup there.
Markers of calls that do not open a group leave a warning if the answer has no call.

A model may forget to close its reasoning before it calls a tool. So an opener of calls in reasoning
starts a trial: the call parser reads the text after it. If it finds the name of a tool of the
request, this is a call, after which the reasoning continues. Otherwise the opener was text, and the
text after it is read again as reasoning. A trial holds back at most MAX_TRIAL_CHARS characters.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from gateway.formats.answer_parser import AnswerParser
from gateway.formats.call_parser import CallSyntax
from gateway.formats.event_builder import BuilderCheckpoint, EventBuilder
from gateway.formats.events import Content, Event, Reasoning, ToolCall
from gateway.formats.lexicon import MarkerPart, Piece
from gateway.formats.parser import FormatParserState, Moves, ParserContext
from gateway.formats.reasoning import NO_REASONING, ReasoningFormat

START, CONTENT, WRAPPED, HEADER = "start", "content", "wrapped", "header"
OPENING, REASONING, CALLS = "opening", "reasoning", "calls"


MAX_HEADER_CHARS = 128
"""Most characters of a header. A longer text is content."""

MAX_TRIAL_CHARS = 1024
MAX_TRIAL_TOKENS = 8
"""Limits of a trial: a call in reasoning must name its tool before the trial reaches one of them.
"""

TEXT, TOKEN, PART = "text", "token", "part"
TrialPiece = tuple[str, str]
"""A piece of the answer as plain data: its kind, which is one of these three, and its text."""


class StandardParserState(FormatParserState):
    """State of a `StandardParser`.

    thoughts  all reasoning so far; kept only if it may have to be repeated as content
    heading   the header so far
    marked    whether any marker has been read; if not, text that looks like a header is content
    inside    whether the current group of calls is inside reasoning
    opener    the opener of calls that started the current trial; "" outside of trials
    trial     the pieces read since that opener, which may have to be read again
    """

    at: str = START
    thoughts: list[str] = []
    heading: str = ""
    marked: bool = False
    inside: bool = False
    opener: str = ""
    trial: list[TrialPiece] = []


class StandardParser(AnswerParser):
    """Parser of most answers, as this module describes. `tools` is the syntax of the calls."""

    State = StandardParserState

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
        self._again: list[TrialPiece] = []  # pieces to be read again; empty between pushes
        super().__init__(tools, context, builder, state, starts_inside=starts_inside)

    def moves_key(self) -> Hashable:
        return self.tools, self.reasoning, self.context.calls_or_text

    def call_syntax(self) -> CallSyntax | None:
        return self.tools

    def start(self, starts_inside: bool) -> None:
        if self.reasoning.prefix:
            self.builder.content(self.reasoning.prefix)
        if starts_inside and self.reasoning.close:
            self._open_reasoning()
        elif self.reasoning.header:
            self.s.at = HEADER

    def moves(self) -> Moves:
        reasoning, tools = self.reasoning, self.tools
        openers = tools.openers() if tools else ()
        calls = (openers, self.open_calls)
        own = {*openers, *reasoning.markers()}
        signs = tuple(sign for sign in tools.signs() if sign not in own) if tools else ()
        stray = (() if self.context.calls_or_text else signs, self._sign_in_content)
        later = () if self.context.calls_or_text else (calls, stray)
        opens = (reasoning.open, self._open_reasoning)
        again = () if reasoning.only_at_start else (opens,)
        wraps = (reasoning.wrap_open, self._wrap)
        wraps_later = (wraps,) if reasoning.header else ()
        between = ((reasoning.header, self._start_header), (reasoning.ignored, self._ignore))
        call_in_it = self._end_with_calls if reasoning.calls_end_it else self._open_trial
        ends = (
            (reasoning.close, self._close_reasoning),
            (() if reasoning.drafts_calls else openers, call_in_it),
        )
        return {
            START: (
                opens,
                wraps,
                *between,
                calls,
                (tools.start_openers() if tools else (), self.open_calls),
                stray,
            ),
            CONTENT: (*again, *wraps_later, *between, *later),
            WRAPPED: (*again, (reasoning.wrap_close, self._unwrap), *between, *later),
            HEADER: (opens, *wraps_later, *between, calls, stray),
            OPENING: ((reasoning.label, self._skip_label), (reasoning.open, self.skip), *ends),
            REASONING: ends,
        }

    def push(self, piece: Piece) -> list[Event]:
        """Parse `piece` like `FormatParser.push`, with a shortcut for text without any markup."""
        if type(piece) is str and piece:
            event = self.fast_event(piece)
            if event is not None:
                return [event]
        return super().push(piece)

    def fast_event(self, text: str) -> Event | None:
        """Return the event for `text` if parsing it would change no state, else None."""
        at, scanner, call_parser = self.s.at, self._scanner, self.call_parser
        if at == CALLS and call_parser is not None:
            return call_parser.fast_event(text)
        if scanner is not None and not scanner.lets_through(text):
            return None
        if at == CONTENT and self.builder.passes_content(text):
            return Content(text)
        streams_reasoning = at == REASONING and not self.reasoning.force_content
        if streams_reasoning and self.builder.passes_reasoning(text):
            return Reasoning(text)
        return None

    # ---- transitions

    def _first_content(self, text: str) -> str:
        """Handle the text at the start. Blanks do not start the content. Other text does, and is
        returned to be read as content."""
        if not text.isspace():
            self.s.at = CONTENT
            return text
        self.builder.content(text)
        return ""

    def _first_reasoning(self, text: str) -> str:
        if not text.isspace():
            self.s.at = REASONING
            return text
        self._add_reasoning(text)
        return ""

    def _add_reasoning(self, text: str) -> None:
        self.builder.reasoning(text)
        if self.reasoning.force_content:
            self.s.thoughts.append(text)

    def on_marker(self, marker: str) -> None:
        self.s.marked = True
        super().on_marker(marker)

    def on_stray(self, marker: str) -> None:
        match self.s.at:
            case "calls":
                self.read_call_token(marker)
            case "opening" | "reasoning" if marker not in self.reasoning.open:
                self._add_reasoning(marker)

    def _in_header(self, text: str) -> None:
        s = self.s
        s.heading += text
        if len(s.heading) > MAX_HEADER_CHARS:
            s.at = CONTENT
            self.builder.content(s.heading)

    def _sign_in_content(self, marker: str) -> None:
        """Handle a marker of calls outside of calls: a token is dropped, other text is content."""
        s = self.s
        self.builder.found_markup(marker)
        if self.context.lexicon.is_token(marker):
            return
        if s.at == HEADER:
            self._in_header(marker)
            return
        s.at = CONTENT if s.at == START else s.at
        self.builder.content(marker)

    def _mark(self, then: str) -> None:
        self.builder.markup()
        self.s.at = then

    def _wrap(self, marker: str) -> None:
        self._mark(WRAPPED)

    def _unwrap(self, marker: str) -> None:
        self._mark(CONTENT)

    def _start_header(self, marker: str) -> None:
        self._mark(HEADER)
        self.s.heading = ""

    def _ignore(self, marker: str) -> None:
        self._mark(self.s.at)

    def _open_reasoning(self, marker: str = "") -> None:
        self.builder.start_reasoning()
        self.s.at = OPENING

    def _skip_label(self, marker: str) -> None:
        self.s.at = REASONING

    def _close_reasoning(self, marker: str = "") -> None:
        self.builder.end_reasoning()
        self.s.at = START

    def _end_with_calls(self, marker: str) -> None:
        self._close_reasoning()
        self.open_calls(marker)

    # ---- tool calls

    def read_calls(self, piece: str | MarkerPart) -> str:
        return self._try_call(piece) if self.s.opener else super().read_calls(piece)

    TEXT = {
        START: _first_content,
        CONTENT: AnswerParser.as_content,
        WRAPPED: AnswerParser.as_content,
        HEADER: _in_header,
        OPENING: _first_reasoning,
        REASONING: _add_reasoning,
        CALLS: read_calls,
    }

    def read_call_token(self, marker: str) -> None:
        """Handle a marker token inside a group of calls. The call parser handles it, unless the
        token opens or closes the reasoning between two calls."""
        s, reasoning = self.s, self.reasoning
        if s.opener:
            self._try_call_token(marker)
        elif s.inside and marker in reasoning.close and self.calls.is_between:
            self.calls.end(True)
            s.inside = False
            self._close_reasoning()
        elif not s.inside and marker in reasoning.open and self.calls.is_between:
            self.calls.end(True)
            self._open_reasoning()
        else:
            super().read_call_token(marker)

    def on_calls_done(self) -> None:
        s = self.s
        more_calls = self.context.calls_or_text and self.builder.num_calls > 0
        s.at = REASONING if s.inside else START if more_calls else CONTENT
        if s.inside and self._closes_both():
            self._close_reasoning()
        s.inside = False

    def _closes_both(self) -> bool:
        """Return whether one marker closes both calls and reasoning."""
        return self.tools is not None and not {*self.reasoning.close}.isdisjoint(
            self.tools.markers()
        )

    # ---- trials: an opener of calls in reasoning

    def _open_trial(self, marker: str) -> None:
        s = self.s
        s.at, s.inside, s.opener, s.trial = CALLS, True, marker, []
        self.calls.open(marker)

    def _try_call(self, piece: str | MarkerPart) -> str:
        """Read `piece` as a part of a call. Return the text that was not read. Text is tried only
        up to the limit, so the result does not depend on how the text was cut."""
        checkpoint = self.builder.checkpoint()
        if isinstance(piece, MarkerPart):
            rest, later = self.calls.read(piece), ""
            self._keep(PART, piece.text)
        else:
            room = MAX_TRIAL_CHARS - self._num_tried()
            now, later = piece[:room], piece[room:]
            rest = self.calls.read(now)
            self._keep(TEXT, now)
        if self._is_call(checkpoint):
            return rest + later
        if later:
            self._again.append((TEXT, later))
        return ""

    def _try_call_token(self, marker: str) -> None:
        checkpoint = self.builder.checkpoint()
        # A marker of reasoning never occurs in a call before the call's name.
        if marker in self.reasoning.open + self.reasoning.close:
            self._give_up(checkpoint)
            self._again.append((TOKEN, marker))
        else:
            self.calls.read_token(marker)
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
        """Return whether the trial has turned out to be a call. Return False while that is
        undecided, too.

        The first event since the checkpoint decides. Without an event, the trial fails when the
        call parser is done or the limit is reached. A decision ends the trial.
        """
        s, emitted = self.s, self.builder.out[checkpoint.num_events :]
        if emitted and isinstance(emitted[0], ToolCall) and self.builder.declares(emitted[0].name):
            s.opener, s.trial = "", []
            self.leave_if_done()
            return True
        num_tokens = sum(kind != TEXT for kind, _ in s.trial)
        is_full = self._num_tried() >= MAX_TRIAL_CHARS or num_tokens >= MAX_TRIAL_TOKENS
        if emitted or self.calls.s.done or is_full:
            self._give_up(checkpoint)
        return False

    def _give_up(self, checkpoint: BuilderCheckpoint) -> None:
        """Treat the tentative start of a call as reasoning, because no call follows: roll back to
        `checkpoint`. The pieces after the opener will be read again."""
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
        """Read the pieces of a failed trial again. An opener among them may start another trial."""
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
        if self.s.at == CALLS and not is_ended:
            self.calls.end(complete)
        elif self.s.at in (OPENING, REASONING):
            self.builder.end_reasoning()
        elif self.s.at == HEADER and not self.s.marked:
            self.builder.content(self.s.heading)
        if self.reasoning.force_content and not self.builder.s.said:
            self.builder.content("".join(self.s.thoughts).strip())
        self.builder.finish()

    def _end_trial(self, complete: bool) -> bool:
        """End the trial, because the answer has ended. Return whether the trial was a call; that
        call has then been ended, too."""
        s = self.s
        if not complete:  # it may be the start of a call, so it is dropped
            s.at, s.inside, s.opener, s.trial = REASONING, False, "", []
            return False
        checkpoint = self.builder.checkpoint()
        self.calls.end(True)
        if self._is_call(checkpoint):
            return True
        if s.opener:
            self._give_up(checkpoint)
        self._release_held()
        return False
