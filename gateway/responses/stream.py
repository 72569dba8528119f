"""The sink of a response: what the engine's answer says, told to whoever takes frames.

A stream, a whole answer and one made in the background differ in the taker alone, so they cannot
say different things. Called from the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gateway.answering import Answer, Choice
from gateway.output.events import Content, Delta, Failed, Finished
from gateway.responses.events import ENDS, IN_PROGRESS, Frame, ResponseEvents
from gateway.responses.response import Told, error_of, usage_of
from gateway.text.logprobs import chat_logprobs
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ServingError
from protocol.messages import TokenLogprobs


class LogprobsShown:
    """Logprobs of a message's text, in the shape of `output_text`."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def of(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        told = chat_logprobs(self._tokenizer, entries, num_top=self._num_top)
        return list(msgspec.to_builtins(told))

    def window(self, entries: Sequence[TokenLogprobs], text: str) -> tuple[int, int]:
        """Which of a delta's tokens spell `text`: the others are markup, thinking, or the token
        that ended it. All of them where no run of them does (half of a character waits)."""
        wanted = text.encode()
        spelt = [self._tokenizer.token_bytes(entry.token_id) for entry in entries]
        for start in range(len(spelt)):
            said, end = b"", start
            while end < len(spelt) and len(said) < len(wanted):
                said += spelt[end]
                end += 1
            if said == wanted:
                return start, end
        return 0, len(entries)


class Taker(Protocol):
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
        answer: Answer,
        events: ResponseEvents,
        taker: Taker,
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

    def delta(self, choice: Choice, delta: Delta) -> None:
        if self._is_queued:
            self._is_queued = False
            self._events.proceed()
            self._taker.begun(self._events.head.told(IN_PROGRESS))
        entries = delta.logprobs if self._logprobs is not None else ()
        for event in delta.events:
            match event:
                case Finished():
                    self._reason = event.reason
                case Failed():  # it is told by `fail`
                    pass
                case Content() if self._logprobs is not None and entries:
                    start, end = self._logprobs.window(entries, event.text)
                    self._events.push(event, self._logprobs.of(entries[start:end]))
                    entries = entries[end:]
                case _:
                    self._events.push(event)
        if frames := self._events.taken():
            self._taker.write(frames)

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
            response = events.end(status, usage=usage_of(self._answer), **why)
            if frames := events.taken():
                self._taker.write(frames)
            self._taker.close(response, events.next_number)
