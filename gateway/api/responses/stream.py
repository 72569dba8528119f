"""The sink of a response: passes an answer's events to a frame writer.

Streamed, complete and background responses differ only in the frame writer, so their content
cannot differ. Called from the hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol

import msgspec

from gateway.api.responses.events import ENDS, IN_PROGRESS, Frame, ResponseEvents
from gateway.api.responses.response import Json, error_of, usage_of
from gateway.formats.events import Content, Failed, Finished, OutputDelta
from gateway.generation.choice import Choice
from gateway.generation.group import ChoiceGroup
from gateway.observe.timings import told_timings
from gateway.text.logprobs import chat_logprobs
from gateway.text.tokenizer import Tokenizer
from protocol.errors import ServingError
from protocol.messages import TokenLogprobs


class TextLogprobs:
    """The logprobs of one response's text, in the shape of `output_text`.

    Each token is reported with the text it spells. Tokens that spell none (markup, thinking, stop
    tokens) are omitted. Text may be emitted later than its tokens (blanks, incomplete characters),
    so tokens after the last text wait.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._waiting: list[TokenLogprobs] = []

    def for_texts(self, entries: Sequence[TokenLogprobs], texts: Sequence[str]) -> list[list[Any]]:
        """Return the logprobs for each text of a delta; `entries` are the delta's tokens. The
        search starts at the end, because the reasoning may contain the same text."""
        known = [*self._waiting[-MAX_WAITING:], *entries]
        self._waiting = known
        found: list[list[Any]] = []
        end = len(known)
        for text in reversed(texts):
            window = self._window(known[:end], text.encode())
            if window is None:  # a stop string was cut off: use all new tokens
                window = (min(end, len(known) - len(entries)), end)
            if not found:
                self._waiting = known[window[1] :]
            end = window[0]
            found.append(self._formatted(known[slice(*window)]))
        return found[::-1]

    def _window(self, known: Sequence[TokenLogprobs], wanted: bytes) -> tuple[int, int] | None:
        """Return the range of the last consecutive tokens that spell `wanted`."""
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

    def _formatted(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        found = chat_logprobs(self._tokenizer, entries, num_top=self._num_top)
        return list(msgspec.to_builtins(found))


MAX_WAITING = 64
"""Limit on waiting tokens. No format holds back more text than this."""


class FrameWriter(Protocol):
    """The destination of a response's frames. No method may block.

    start  called when a queued response starts
    write  receives each list of frames
    close  receives the final response and the sequence number for its last event, which the
           writer creates
    """

    def start(self, response: Json) -> None: ...
    def write(self, frames: list[Frame]) -> None: ...
    def close(self, response: Json, number: int) -> None: ...


class ResponseSink:
    """The sink of one response. `logprobs` is None if they are not requested."""

    def __init__(
        self,
        group: ChoiceGroup,
        events: ResponseEvents,
        frame_writer: FrameWriter,
        logprobs: TextLogprobs | None = None,
        *,
        queued: bool = False,
    ) -> None:
        self._group = group
        self._events = events
        self._frame_writer = frame_writer
        self._logprobs = logprobs
        self._reason = "abort"
        self._is_queued = queued
        self._is_over = False
        events.start(queued=queued)
        frame_writer.write(events.pop_frames())

    def delta(self, choice: Choice, delta: OutputDelta) -> None:
        if self._is_queued:
            self._is_queued = False
            self._events.proceed()
            self._frame_writer.start(self._events.head.response(IN_PROGRESS))
        logprobs = self._logprobs_of(delta)
        for event in delta.events:
            match event:
                case Finished():
                    self._reason = event.reason
                case Failed():  # `fail` reports it
                    pass
                case Content():
                    self._events.push(event, next(logprobs))
                case _:
                    self._events.push(event)
        if frames := self._events.pop_frames():
            self._frame_writer.write(frames)

    def _logprobs_of(self, delta: OutputDelta) -> Iterator[list[Any]]:
        """Yield the logprobs of each Content event."""
        if self._logprobs is None:
            return repeat([])
        texts = [event.text for event in delta.events if isinstance(event, Content)]
        return iter(self._logprobs.for_texts(delta.logprobs, texts))

    def end(self) -> None:
        status, incomplete = ENDS[self._reason]
        self._close(status, incomplete=incomplete)

    def cancel(self) -> None:
        """End the response as cancelled."""
        self._close("cancelled")

    def fail(self, error: ServingError) -> None:
        self._close("failed", error=error_of(error))

    def _close(self, status: str, **why: Any) -> None:
        if not self._is_over:
            self._is_over = True
            events = self._events
            usage, timings = usage_of(self._group), told_timings(self._group)
            response = events.end(status, usage=usage, timings=timings, **why)
            if frames := events.pop_frames():
                self._frame_writer.write(frames)
            self._frame_writer.close(response, events.next_number)
