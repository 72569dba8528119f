"""The sink of a response: what the engine's answer says, told to whoever takes frames.

A stream, a whole answer and one made in the background differ in the taker alone, so they cannot
say different things. Called from the hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

import msgspec

from gateway.api.responses.events import ENDS, IN_PROGRESS, Frame, ResponseEvents
from gateway.api.responses.response import Told, error_of, usage_of
from gateway.formats.events import Content, Failed, Finished, OutputDelta
from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
from gateway.observe.timings import told_timings
from gateway.text.logprobs import chat_logprobs
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ServingError
from protocol.messages import TokenLogprobs


class LogprobsShown:
    """Logprobs of a message's text, in the shape of `output_text`. One response's.

    A token is told with the text that it spells; the others are markup, thinking, or what ended the
    answer. Text may be told later than its tokens came (blanks, half a character), so those behind
    the last text wait.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._waiting: list[TokenLogprobs] = []

    def of(self, entries: Sequence[TokenLogprobs], texts: Sequence[str]) -> list[list[Any]]:
        """Of each of a delta's texts; `entries` are the delta's. Looked for from the end, since
        what was thought may be said again."""
        known = [*self._waiting[-MAX_WAITING:], *entries]
        self._waiting = known
        told: list[list[Any]] = []
        end = len(known)
        for text in reversed(texts):
            window = self._window(known[:end], text.encode())
            if window is None:  # a stop string was cut off: all that came with it
                window = (min(end, len(known) - len(entries)), end)
            if not told:
                self._waiting = known[window[1] :]
            end = window[0]
            told.append(self._shown(known[slice(*window)]))
        return told[::-1]

    def _window(self, known: Sequence[TokenLogprobs], wanted: bytes) -> tuple[int, int] | None:
        """The last run of tokens that spells it."""
        spelt = [self._tokenizer.token_bytes(entry.token_id) for entry in known]
        for end in range(len(spelt), 0, -1):
            left = len(wanted)
            for start in range(end - 1, -1, -1):
                if not wanted.endswith(spelt[start], 0, left):
                    break
                left -= len(spelt[start])
                if not left:
                    return start, end
        return None

    def _shown(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        told = chat_logprobs(self._tokenizer, entries, num_top=self._num_top)
        return list(msgspec.to_builtins(told))


MAX_WAITING = 64
"""Tokens; no format holds more of an answer's own text back."""


class FrameWriter(Protocol):
    """`begun` is told when a queued response is queued no more; `write` takes frames as they are
    made; `close` takes the response, and the number of its last event, which is the taker's to
    make. Must not block."""

    def begun(self, response: Told) -> None: ...
    def write(self, frames: list[Frame]) -> None: ...
    def close(self, response: Told, number: int) -> None: ...


class ResponseSink:
    """logprobs  None: none are told"""

    def __init__(
        self,
        answer: ChoiceGroup,
        events: ResponseEvents,
        taker: FrameWriter,
        logprobs: LogprobsShown | None = None,
        *,
        queued: bool = False,
    ) -> None:
        self._answer = answer
        self._events = events
        self._taker = taker
        self._logprobs = logprobs
        self._reason = "abort"
        self._is_queued = queued
        self._is_over = False
        events.begin(queued=queued)
        taker.write(events.taken())

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        if self._is_queued:
            self._is_queued = False
            self._events.proceed()
            self._taker.begun(self._events.head.told(IN_PROGRESS))
        logprobs = self._logprobs_of(delta)
        for event in delta.events:
            match event:
                case Finished():
                    self._reason = event.reason
                case Failed():  # it is told by `fail`
                    pass
                case Content():
                    self._events.push(event, next(logprobs))
                case _:
                    self._events.push(event)
        if frames := self._events.taken():
            self._taker.write(frames)

    def _logprobs_of(self, delta: OutputDelta) -> Iterator[list[Any]]:
        """For each bit of content."""
        if self._logprobs is None:
            return repeat([])
        texts = [event.text for event in delta.events if isinstance(event, Content)]
        return iter(self._logprobs.of(delta.logprobs, texts))

    def end(self) -> None:
        status, incomplete = ENDS[self._reason]
        self._close(status, incomplete=incomplete)

    def cancel(self) -> None:
        """Nobody wants to hear the rest."""
        self._close("cancelled")

    def fail(self, error: ServingError) -> None:
        self._close("failed", error=error_of(error))

    def _close(self, status: str, **why: Any) -> None:
        if not self._is_over:
            self._is_over = True
            events = self._events
            usage, timings = usage_of(self._answer), told_timings(self._answer)
            response = events.end(status, usage=usage, timings=timings, **why)
            if frames := events.taken():
                self._taker.write(frames)
            self._taker.close(response, events.next_number)
