"""The parser of one choice: the engine's outputs go in, events come out.

Token ids become text and markers, a format parser turns these into events, and stop strings are
searched for in the events. The result depends on the tokens alone, not on how they were cut into
messages: the events are equal once they are merged. A parser belongs to one choice. Its
`ParserFactory` holds the constants that the choices of one request share.

Stop strings are searched for in content only. A stop string in reasoning or in a call's arguments
has no effect. A call or reasoning interrupts content, so no stop string spans it. If only one call
is allowed, the answer ends with that call.

Special tokens have no text here, unless `skip_special_tokens` is false. The format parser receives
those that are markers or parts of markers as a `MarkerToken` or a `MarkerPart`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.formats.event_builder import DeclaredTool, new_call_id
from gateway.formats.events import (
    Content,
    Event,
    Failed,
    Finished,
    OutputDelta,
    OutputWarning,
    Reasoning,
    ToolCallEnd,
    finish_reason,
    merged,
)
from gateway.formats.lexicon import Lexicon, MarkerToken, Piece
from gateway.formats.parser import FormatParser
from gateway.formats.registry import BoundFormat, parser_state
from gateway.text.detokenizer import DetokenizerState
from gateway.text.stop import StopMatcher, StopState, compile_stops
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs
from protocol.engine.messages import Output
from protocol.wire.errors import ErrorInfo


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's answers are detokenized and stopped.

    stop                 strings that end the text
    include_stop         whether the text includes the stop string, or the text of the stop token
    min_tokens           number of tokens at the start whose text is not searched for stop strings
    skip_special_tokens  whether special tokens have no text
    continues            whether the answer continues the prompt's text (a completion); a blank
                         before its first word is then kept
    end_token_ids        tokens that end the answers besides the model's end tokens, and are no
                         stop reason either
    """

    stop: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    continues: bool = False
    end_token_ids: Sequence[int] = ()


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's answers are parsed.

    format               format of the answers, bound to this model's vocabulary
    tools                tools of the request; None: unknown, so any name is accepted
    starts_inside        whether the prompt has already opened the reasoning
    continues_reasoning  whether it has also begun the text of the reasoning
    include_reasoning    whether reasoning is emitted; otherwise it is parsed and dropped
    parallel_tool_calls  if false, the answer ends with its first complete call
    calls_or_text        whether the answer is either calls or text, never both; in a text, nothing
                         is then parsed as a call
    new_id               makes an id for a call to which the model gave none
    """

    format: BoundFormat
    tools: Sequence[DeclaredTool] | None = None
    starts_inside: bool = False
    continues_reasoning: bool = False
    include_reasoning: bool = True
    parallel_tool_calls: bool = True
    calls_or_text: bool = False
    new_id: Callable[[], str] = new_call_id


class ParserState(msgspec.Struct, frozen=True):
    """State of a `ChoiceParser` between two pushes, as plain data.

    `stop` is None if there are no stop strings. `parser` is None if the answer has no format. In
    the serialised state, `parser` has the name "machine".
    """

    detokenizer: DetokenizerState
    stop: StopState | None
    num_tokens: int
    finished: bool
    waiting_ids: list[int] = []
    waiting_logprobs: list[TokenLogprobs] = []
    parser: dict[str, Any] | None = msgspec.field(default=None, name="machine")
    completed_calls: int = 0
    full: bool = False


class ParserFactory:
    """Makes a parser for each choice of a request. Without `answer` all text is content."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: ReadOptions | None = None,
        answer: AnswerOptions | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options or ReadOptions()
        self.answer = answer
        self.end_token_ids = tokenizer.eos_token_ids.union(self.options.end_token_ids)
        self.stops = compile_stops(self.options.stop)
        is_one_call = answer is not None and not answer.parallel_tool_calls
        self.may_stop = self.stops is not None or is_one_call
        """Whether a stop string or the only allowed call may end an answer at any of its tokens."""

        lexicon = answer.format.lexicon if answer else Lexicon()
        self.pieces: Mapping[int, Piece] = lexicon.pieces
        """Token id -> the format parser's input for it."""
        if not self.options.skip_special_tokens:  # then the text has the parts of markers
            markers = lexicon.tokens.items()
            self.pieces = {token: MarkerToken(token, marker) for token, marker in markers}

    def format_parser(self, state: dict[str, Any] | None) -> FormatParser | None:
        """Return a parser of the answer's format: a new one, or one that continues from `state`.
        Return None if there is no format."""
        if self.answer is None:
            return None
        return self.answer.format.parser(
            tools=self.answer.tools,
            new_id=self.answer.new_id,
            starts_inside=self.answer.starts_inside,
            continues_reasoning=self.answer.continues_reasoning,
            calls_or_text=self.answer.calls_or_text,
            state=state,
        )

    def new(self, state: ParserState | None = None) -> ChoiceParser:
        """Return a new parser, or one that continues from `state`."""
        return ChoiceParser(self, state)


class ChoiceParser:
    """Parses one choice. Once `finished` is true, the last event has been returned. Every later
    push returns an empty delta, so late messages do no harm."""

    __slots__ = (
        "_allows_many_calls",
        "_detokenizer",
        "_factory",
        "_include_reasoning",
        "_is_last_call_done",
        "_is_unfiltered",
        "_min_tokens",
        "_num_completed_calls",
        "_num_tokens",
        "_parser",
        "_piece_ids",
        "_pieces",
        "_stop",
        "_waiting_ids",
        "_waiting_logprobs",
        "finished",
    )

    def __init__(self, factory: ParserFactory, state: ParserState | None = None) -> None:
        options, answer = factory.options, factory.answer
        self._factory = factory
        self._detokenizer = factory.tokenizer.detokenizer(
            skip_special_tokens=options.skip_special_tokens,
            continues=options.continues,
            state=state.detokenizer if state else None,
        )
        self._stop: StopMatcher | None = None
        if factory.stops is not None:
            stop_state = state.stop if state else None
            self._stop = StopMatcher(factory.stops, include=options.include_stop, state=stop_state)
        self._min_tokens = options.min_tokens if self._stop is not None else 0
        self._include_reasoning = answer is None or answer.include_reasoning
        self._allows_many_calls = answer is None or answer.parallel_tool_calls
        self._is_unfiltered = (
            self._stop is None and self._include_reasoning and self._allows_many_calls
        )
        self._parser = factory.format_parser(state.parser if state else None)
        self._pieces = factory.pieces
        self._piece_ids = frozenset(self._pieces)
        self._num_tokens = state.num_tokens if state else 0
        self._num_completed_calls = state.completed_calls if state else 0
        self._is_last_call_done = state.full if state else False
        self._waiting_ids = list(state.waiting_ids) if state else []
        self._waiting_logprobs = list(state.waiting_logprobs) if state else []
        self.finished = state.finished if state else False

    def state(self) -> ParserState:
        """Return the state, from which `ParserFactory.new` makes a parser that continues."""
        return ParserState(
            detokenizer=self._detokenizer.state(),
            stop=self._stop.state() if self._stop else None,
            num_tokens=self._num_tokens,
            finished=self.finished,
            waiting_ids=list(self._waiting_ids),
            waiting_logprobs=list(self._waiting_logprobs),
            parser=parser_state(self._parser) if self._parser else None,
            completed_calls=self._num_completed_calls,
            full=self._is_last_call_done,
        )

    @property
    def stopped(self) -> bool:
        """Whether a stop string, or the only allowed call, has ended the answer. The caller should
        then abort the request, unless the engine has ended it.
        """
        return self._is_last_call_done or (
            self._stop is not None and self._stop.matched is not None
        )

    @property
    def may_stop(self) -> bool:
        return self._factory.may_stop

    @property
    def num_waiting(self) -> int:
        """Number of tokens that no delta has contained yet, because their text is held back."""
        return len(self._waiting_ids)

    def release(self) -> OutputDelta:
        """Return all tokens whose text is still held back, as a delta without events, for a caller
        that needs the tokens now. Their text follows in later deltas."""
        return self._delta([])

    def push(self, output: Output) -> OutputDelta:
        """Return the delta for one output of the engine. It is empty, and so false, while all text
        is held back."""
        if self.finished:
            return OutputDelta(num_after_end=len(output.tokens))
        if len(output.tokens) > 1 and self._factory.may_stop:
            return self._push_each(output)
        self._waiting_ids += output.tokens
        self._waiting_logprobs += output.logprobs
        events = self._read(self._textual(output))
        if output.finish is None and not self.stopped:
            return self._delta(events) if events else _NOTHING
        if not self.stopped:
            events = [*events, *self._finish(complete=output.finish == "stop")]
            events = events if self._parser else merged(events)
        self.finished = True
        return self._delta([*events, self._end(output)])

    def _push_each(self, output: Output) -> OutputDelta:
        """Push the output's tokens one at a time. So if a stop string or a call ends the answer,
        its tokens do not depend on how the engine grouped them into outputs."""
        events: list[Event] = []
        ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for place, piece in enumerate(_one_per_token(output), start=1):
            delta = self.push(piece)
            events += delta.events
            ids += delta.token_ids
            logprobs += delta.logprobs
            if self.finished:
                return OutputDelta(merged(events), ids, logprobs, len(output.tokens) - place)
        return OutputDelta(merged(events), ids, logprobs)

    def _textual(self, output: Output) -> list[int]:
        """Return the tokens that have text or are markers: all except the stop token.

        The stop token is returned, too, if it is a marker, because some formats end a call with it,
        or if its text is wanted (`include_stop`).
        """
        last = output.stop_token
        if last is None or last in self._pieces or self._factory.options.include_stop:
            return output.tokens
        return output.tokens[:-1]

    # ---- token ids to events

    def _read(self, ids: Sequence[int]) -> list[Event]:
        if self._is_unfiltered and self._piece_ids.isdisjoint(ids):  # the usual case
            self._num_tokens += len(ids)
            return self._counted(self._text(self._detokenizer.push(ids)))
        unsearched = self._min_tokens - self._num_tokens
        self._num_tokens += len(ids)
        if unsearched <= 0:
            return self._filtered(self._parse(ids), search=self._stop is not None)
        events = self._filtered(self._parse(ids[:unsearched]), search=False)
        if len(ids) > unsearched and not self.stopped:
            events += self._filtered(self._parse(ids[unsearched:]), search=True)
        return events

    def _finish(self, *, complete: bool) -> list[Event]:
        """Return the remaining events. `complete` is false if the answer was cut off."""
        search = self._stop is not None and self._num_tokens > self._min_tokens
        rest = self._text(self._detokenizer.finish())
        rest += self._parser.finish(complete) if self._parser else []
        events = self._filtered(rest, search=search)
        if search and not self.stopped:
            self._flush(events)
        return events

    def _parse(self, ids: Sequence[int]) -> list[Event]:
        if self._piece_ids.isdisjoint(ids):
            return self._text(self._detokenizer.push(ids))
        assert self._parser is not None, "without a parser there are no markers"
        events: list[Event] = []
        start = 0
        for at, token_id in enumerate(ids):
            if (piece := self._pieces.get(token_id)) is not None:
                text = self._detokenizer.push(ids[start:at]) + self._detokenizer.finish()
                events += self._text(text)
                events += self._parser.push(piece)
                start = at + 1
        return events + self._text(self._detokenizer.push(ids[start:]))

    def _text(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._parser is None else self._parser.push(text)

    # ---- which events the client receives

    def _filtered(self, events: list[Event], *, search: bool) -> list[Event]:
        """Return those of `events` that the client receives, up to the end of the answer."""
        if not search and self._include_reasoning and self._allows_many_calls:
            return self._counted(events)
        sent: list[Event] = []
        for event in events:
            self._filter(event, sent, search)
            if self.stopped:
                break
        return sent

    def _counted(self, events: list[Event]) -> list[Event]:
        """Count the completed calls in `events`, and return `events`."""
        for event in events:
            if type(event) is ToolCallEnd:
                self._num_completed_calls += 1
        return events

    def _filter(self, event: Event, sent: list[Event], search: bool) -> None:
        """Add to `sent` the part of `event` that the client receives."""
        if isinstance(event, Content):
            text = self._stop.push(event.text) if search and self._stop else event.text
            if text:
                sent.append(Content(text))
            return
        if search and not isinstance(event, OutputWarning):
            self._flush(sent)
            if self.stopped:
                return
        if self._include_reasoning or not isinstance(event, Reasoning):
            sent.append(event)
        if isinstance(event, ToolCallEnd):
            self._num_completed_calls += 1
            self._is_last_call_done = not self._allows_many_calls

    def _flush(self, sent: list[Event]) -> None:
        """Add to `sent` the content that was held back as the possible start of a stop string."""
        assert self._stop is not None
        if text := self._stop.finish():
            sent.append(Content(text))

    def _end(self, output: Output) -> Finished | Failed:
        matched = self._stop.matched if self._stop is not None else None
        reason = finish_reason(
            output.finish, stop_matched=self.stopped, completed_calls=self._num_completed_calls
        )
        return end_of(output, reason, self._factory.end_token_ids, matched)

    def _delta(self, events: list[Event]) -> OutputDelta:
        """Return a delta with `events` and with all tokens received since the last delta."""
        delta = OutputDelta(events, self._waiting_ids, self._waiting_logprobs)
        self._waiting_ids, self._waiting_logprobs = [], []
        return delta


def end_of(
    output: Output, reason: str, eos_token_ids: Collection[int], matched: str | None = None
) -> Finished | Failed:
    """Return the last event of an answer: Failed if `reason` is "error", otherwise Finished.

    The stop reason is `matched`, the stop string that was found. Without one it is the stop token,
    or None if that is one of `eos_token_ids`, the model's own end tokens.
    """
    if reason == "error":
        return Failed(output.error or _UNEXPLAINED)
    if matched is not None or output.stop_token in eos_token_ids:
        return Finished(reason, matched)
    return Finished(reason, output.stop_token)


_NOTHING = OutputDelta()
_UNEXPLAINED = ErrorInfo(code="engine_error", message="the engine failed without giving a reason")


def _one_per_token(output: Output) -> Iterator[Output]:
    """Yield one output per token. The last one has all other fields of `output`."""
    for place in range(len(output.tokens) - 1):
        yield Output(
            request=output.request,
            tokens=output.tokens[place : place + 1],
            logprobs=output.logprobs[place : place + 1],
        )
    yield msgspec.structs.replace(output, tokens=output.tokens[-1:], logprobs=output.logprobs[-1:])


# ---- token ids alone


class TokenPassthroughFactory:
    """Makes a `TokenPassthrough` per choice. `eos_token_ids` are the model's own end tokens."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def new(self) -> TokenPassthrough:
        return TokenPassthrough(self._eos_token_ids)


class TokenPassthrough:
    """Parser of a choice whose client requested only token ids, so nothing is held back.

    Its deltas are those of a `ChoiceParser`, without text. Requests with stop strings need a
    `ChoiceParser`. After the end every push returns an empty delta, so late messages do no harm.
    """

    __slots__ = ("_eos_token_ids", "_finished")
    may_stop = False

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._finished = False

    def push(self, output: Output) -> OutputDelta:
        if self._finished:
            return OutputDelta(num_after_end=len(output.tokens))
        if output.finish is None:
            return OutputDelta([], output.tokens, output.logprobs)
        self._finished = True
        end = end_of(output, finish_reason(output.finish), self._eos_token_ids)
        return OutputDelta([end], output.tokens, output.logprobs)
