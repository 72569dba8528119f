"""The parser of one choice: the engine's outputs in, events out.

The chain is detokenizer, stop strings, events; an answer with a format uses `chain.ParserChain`.
The result depends on the tokens alone, not on how they were cut into messages: merged events are
always equal. A parser belongs to one choice. Its `ParserFactory` holds what the choices of one
request share, all of it constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from gateway.formats.chain import ParserChain
from gateway.formats.event_builder import DeclaredTool, new_call_id
from gateway.formats.events import Content, Event, Failed, Finished, OutputDelta, merged
from gateway.formats.finish import finish_reason
from gateway.formats.registry import BoundFormat, parser_state
from gateway.text.detokenizer import DetokenizerState
from gateway.text.stop import StopMatcher, StopState, compile_stops
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ErrorInfo
from protocol.messages import Output, TokenLogprobs


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's answers are detokenized and stopped.

    stop                 strings that end the text
    include_stop         the text includes the stop string, or the text of the stop token
    min_tokens           text of the first `min_tokens` tokens is not searched for stop strings
    skip_special_tokens  special tokens have no text
    continues            the answer continues the prompt's text (a completion), so a blank before
                         its first word is kept
    """

    stop: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    continues: bool = False


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's answers are parsed.

    format               format of the answers, for this model's vocabulary
    tools                tools of the request; None: unknown, and then any name is accepted
    starts_inside        the prompt has already opened the reasoning (`BoundFormat.starts_inside`)
    include_reasoning    reasoning is emitted; otherwise it is parsed and dropped
    parallel_tool_calls  if false, the answer ends with its first complete call
    calls_or_text        the answer is calls or text, never both: nothing in a text is a call
    new_id               makes an id for a call that has none of its own
    """

    format: BoundFormat
    tools: Sequence[DeclaredTool] | None = None
    starts_inside: bool = False
    include_reasoning: bool = True
    parallel_tool_calls: bool = True
    calls_or_text: bool = False
    new_id: Callable[[], str] = new_call_id


class ParserState(msgspec.Struct, frozen=True):
    """State of a `ChoiceParser` between two pushes, as plain data.

    `stop` is None if there are no stop strings; `parser` is None if the answer has no format. Its
    name on the wire is older than its name here.
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
    """Makes one parser for each choice of a request. Without `answer` all text is content."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: ReadOptions | None = None,
        answer: AnswerOptions | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options or ReadOptions()
        self.answer = answer
        self.stops = compile_stops(self.options.stop)
        is_one_call = answer is not None and not answer.parallel_tool_calls
        self.may_stop = self.stops is not None or is_one_call
        """A stop string or the only allowed call may end an answer at any of its tokens."""

    def new(self, state: ParserState | None = None) -> ChoiceParser:
        """Return a fresh parser, or one that continues from `state`."""
        return ChoiceParser(self, state)


class ChoiceParser:
    """Parses one choice. After `finished` every push returns an empty delta, so late messages do no
    harm.

    stopped   a stop string, or the only allowed call, has ended the answer: the engine should abort
              the request unless it has ended by itself
    finished  the last event has been returned
    """

    __slots__ = (
        "_chain",
        "_detokenizer",
        "_factory",
        "_num_tokens",
        "_stop",
        "_waiting_ids",
        "_waiting_logprobs",
        "finished",
    )

    def __init__(self, factory: ParserFactory, state: ParserState | None = None) -> None:
        options, stops = factory.options, factory.stops
        self._factory = factory
        self._detokenizer = factory.tokenizer.detokenizer(
            skip_special_tokens=options.skip_special_tokens,
            continues=options.continues,
            state=state.detokenizer if state else None,
        )
        stop_state = state.stop if state else None
        self._stop: StopMatcher | None = None
        if stops is not None:
            self._stop = StopMatcher(stops, include=options.include_stop, state=stop_state)
        self._chain = self._make_chain(state)
        self._num_tokens = state.num_tokens if state else 0
        self.finished = state.finished if state else False
        self._waiting_ids = list(state.waiting_ids) if state else []
        self._waiting_logprobs = list(state.waiting_logprobs) if state else []

    def _make_chain(self, state: ParserState | None) -> ParserChain | None:
        answer, options = self._factory.answer, self._factory.options
        if answer is None:
            return None
        parser = answer.format.parser(
            tools=answer.tools,
            new_id=answer.new_id,
            starts_inside=answer.starts_inside,
            calls_or_text=answer.calls_or_text,
            state=state.parser if state else None,
        )
        chain = ParserChain(
            self._detokenizer,
            parser,
            self._stop,
            parts=options.skip_special_tokens,
            min_tokens=options.min_tokens,
            thoughts=answer.include_reasoning,
            many=answer.parallel_tool_calls,
        )
        if state:
            chain.num_tokens = state.num_tokens
            chain.completed, chain.full = state.completed_calls, state.full
        return chain

    def state(self) -> ParserState:
        chain = self._chain
        return ParserState(
            detokenizer=self._detokenizer.state(),
            stop=self._stop.state() if self._stop else None,
            num_tokens=chain.num_tokens if chain else self._num_tokens,
            finished=self.finished,
            waiting_ids=list(self._waiting_ids),
            waiting_logprobs=list(self._waiting_logprobs),
            parser=parser_state(chain.parser) if chain else None,
            completed_calls=chain.completed if chain else 0,
            full=chain.full if chain else False,
        )

    @property
    def stopped(self) -> bool:
        if self._chain is not None:
            return self._chain.ended
        return self._stop is not None and self._stop.matched is not None

    @property
    def may_stop(self) -> bool:
        return self._factory.may_stop

    @property
    def num_waiting(self) -> int:
        """Number of tokens that have not been returned because their text is held back."""
        return len(self._waiting_ids)

    def release(self) -> OutputDelta:
        """Return the waiting tokens before their text, for callers that may only keep a few."""
        return self._delta([])

    def push(self, output: Output) -> OutputDelta:
        """Return the delta that `output` produces. It is empty (and false) while its text is
        held back.
        """
        if self.finished:
            return OutputDelta(num_behind=len(output.tokens))
        if len(output.tokens) > 1 and self._factory.may_stop:
            return self._push_each(output)
        self._waiting_ids += output.tokens
        self._waiting_logprobs += output.logprobs
        if self._chain is not None:
            return self._push_formatted(self._chain, output)
        text = self._text(self._textual(output))
        events: list[Event] = []
        if output.finish is None and not self.stopped:
            if not text:
                return _NOTHING
            return self._delta([Content(text)])
        if not self.stopped:
            text += self._rest()
        if text:
            events.append(Content(text))
        events.append(self._end(output))
        self.finished = True
        return self._delta(events)

    def _push_each(self, output: Output) -> OutputDelta:
        """Push one token at a time.

        An answer that a stop string or a call ends then has the same tokens however they arrived.
        """
        events: list[Event] = []
        ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for place, piece in enumerate(_singly(output), start=1):
            delta = self.push(piece)
            events += delta.events
            ids += delta.token_ids
            logprobs += delta.logprobs
            if self.finished:
                return OutputDelta(merged(events), ids, logprobs, len(output.tokens) - place)
        return OutputDelta(merged(events), ids, logprobs)

    def _push_formatted(self, chain: ParserChain, output: Output) -> OutputDelta:
        # Some formats end a call with a stop token.
        is_whole = output.stop_token is None or chain.is_marker(output.stop_token)
        events = chain.push(output.tokens if is_whole else self._textual(output))
        if output.finish is None and not chain.ended:
            return self._delta(events) if events else _NOTHING
        if not chain.ended:
            events = [*events, *chain.finish(complete=output.finish == "stop")]
        self.finished = True
        return self._delta([*events, self._end(output)])

    def _textual(self, output: Output) -> list[int]:
        """Return the tokens that have text: all except the one that ended the answer."""
        if output.stop_token is None or self._factory.options.include_stop:
            return output.tokens
        return output.tokens[:-1]

    def _text(self, ids: list[int]) -> str:
        before = self._num_tokens
        self._num_tokens += len(ids)
        if self._stop is None:
            return self._detokenizer.push(ids)
        unsearched = self._factory.options.min_tokens - before
        if unsearched <= 0:
            return self._stop.push(self._detokenizer.push(ids))
        free = self._detokenizer.push(ids[:unsearched])
        return free + self._stop.push(self._detokenizer.push(ids[unsearched:]))

    def _rest(self) -> str:
        """Return the text that was held back, after the engine's last output."""
        text = self._detokenizer.finish()
        if self._stop is None:
            return text
        if self._num_tokens <= self._factory.options.min_tokens:
            return text
        return self._stop.push(text) + self._stop.finish()

    def _end(self, output: Output) -> Finished | Failed:
        matched = self._stop.matched if self._stop is not None else None
        chain = self._chain
        reason = finish_reason(
            output.finish,
            stop_matched=self.stopped,
            completed_calls=chain.completed if chain else 0,
        )
        return end_of(output, reason, self._factory.tokenizer.eos_token_ids, matched)

    def _delta(self, events: list[Event]) -> OutputDelta:
        delta = OutputDelta(events, self._waiting_ids, self._waiting_logprobs)
        self._waiting_ids, self._waiting_logprobs = [], []
        return delta


def end_of(
    output: Output, reason: str, eos_token_ids: Collection[int], matched: str | None = None
) -> Finished | Failed:
    """Return the last event. It names the stop string `matched`, or the stop token if the
    request named it.
    """
    if reason == "error":
        return Failed(output.error or _UNEXPLAINED)
    if matched is not None or output.stop_token in eos_token_ids:
        return Finished(reason, matched)
    return Finished(reason, output.stop_token)


_NOTHING = OutputDelta()
_UNEXPLAINED = ErrorInfo(code="engine_error", message="the engine failed without giving a reason")


def _singly(output: Output) -> Iterator[Output]:
    """Yield one output per token. All other fields come with the last token."""
    for place in range(len(output.tokens) - 1):
        yield Output(
            request=output.request,
            tokens=output.tokens[place : place + 1],
            logprobs=output.logprobs[place : place + 1],
        )
    yield msgspec.structs.replace(output, tokens=output.tokens[-1:], logprobs=output.logprobs[-1:])
