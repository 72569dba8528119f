"""One choice, read: the engine's news in, events out.

The chain is detokenizer -> stop strings -> events. What it says depends on the tokens alone, not on
how they were cut into messages: events merged are always equal. A reader belongs to one choice and
is made by a `ReaderFactory`, which holds what the choices of one request share and nothing that
changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.output.events import Content, Delta, Event, Failed, Finished
from gateway.output.finish import finish_reason
from gateway.text.detokenizer import DetokenizerState
from gateway.text.stop import StopMatcher, StopState, compile_stops
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ErrorInfo
from protocol.messages import Output, TokenLogprobs


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request wants its answers read.

    stop                 strings that end the text
    include_stop         the text includes what ended it: the stop string, or the stop token's text
    min_tokens           text of the first so many tokens is not searched for stop strings
    skip_special_tokens  special tokens have no text
    continues            the answer goes on after the prompt's text (a completion), so a blank
                         before its first word is kept
    """

    stop: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    continues: bool = False


class ReaderState(msgspec.Struct, frozen=True):
    """A reader between two pushes, as plain data. `stop` is None where there are no stop
    strings."""

    detokenizer: DetokenizerState
    stop: StopState | None
    num_tokens: int
    finished: bool
    waiting_ids: list[int] = []
    waiting_logprobs: list[TokenLogprobs] = []


class ReaderFactory:
    """Makes one reader for each choice of a request."""

    def __init__(self, tokenizer: Tokenizer, options: ReadOptions | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options or ReadOptions()
        self.stops = compile_stops(self.options.stop)

    def new(self, state: ReaderState | None = None) -> Reader:
        """A fresh reader, or one that goes on where `state` was taken."""
        return Reader(self, state)


class Reader:
    """See the module's law. After `finished` every push is empty, so late news does no harm.

    stopped   a stop string has ended the text: the engine should be told to abort the request,
              unless it has ended by itself
    finished  the last event is out
    """

    __slots__ = (
        "_detokenizer",
        "_factory",
        "_num_tokens",
        "_stop",
        "_waiting_ids",
        "_waiting_logprobs",
        "finished",
    )

    def __init__(self, factory: ReaderFactory, state: ReaderState | None = None) -> None:
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
        self._num_tokens = state.num_tokens if state else 0
        self.finished = state.finished if state else False
        self._waiting_ids = list(state.waiting_ids) if state else []
        self._waiting_logprobs = list(state.waiting_logprobs) if state else []

    def state(self) -> ReaderState:
        return ReaderState(
            detokenizer=self._detokenizer.state(),
            stop=self._stop.state() if self._stop else None,
            num_tokens=self._num_tokens,
            finished=self.finished,
            waiting_ids=list(self._waiting_ids),
            waiting_logprobs=list(self._waiting_logprobs),
        )

    @property
    def stopped(self) -> bool:
        return self._stop is not None and self._stop.matched is not None

    def push(self, output: Output) -> Delta:
        """The news `output` brings. Empty (and false) while its text is held back."""
        if self.finished:
            return _NOTHING
        self._waiting_ids += output.tokens
        self._waiting_logprobs += output.logprobs
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

    def _textual(self, output: Output) -> list[int]:
        """The tokens that have text: all but the one that ended the answer."""
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
        """What was held back, once the engine has said its last."""
        text = self._detokenizer.finish()
        if self._stop is None:
            return text
        if self._num_tokens <= self._factory.options.min_tokens:
            return text
        return self._stop.push(text) + self._stop.finish()

    def _end(self, output: Output) -> Finished | Failed:
        matched = self._stop.matched if self._stop is not None else None
        reason = finish_reason(output.finish, stop_matched=matched is not None)
        if reason == "error":
            return Failed(output.error or _UNEXPLAINED)
        return Finished(reason, self._named(output.stop_token) if matched is None else matched)

    def _named(self, stop_token: int | None) -> int | None:
        """The stop token, if the request named it; the model's own ends are no news."""
        return None if stop_token in self._factory.tokenizer.eos_token_ids else stop_token

    def _delta(self, events: list[Event]) -> Delta:
        delta = Delta(events, self._waiting_ids, self._waiting_logprobs)
        self._waiting_ids, self._waiting_logprobs = [], []
        return delta


_NOTHING = Delta()
_UNEXPLAINED = ErrorInfo(code="engine_error", message="the engine failed and did not say why")
