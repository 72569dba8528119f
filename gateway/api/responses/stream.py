"""Writes an answer as typed events to its destination: the client's stream, a complete response, or
a run that continues without its client.

- The three destinations differ only in the frame writer, so their content cannot differ.
- Sinks and frame writers are called from gevent's hub, so they must not block.
- A stored response is in the store before its last event is sent, because the client may continue
  the response at once, through any gateway process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Protocol

import gevent

from gateway.api.responses.events import Frame, ResponseEvents, encode, last_frame
from gateway.api.responses.responses import (
    IncompleteDetails,
    ResponseObject,
    ResponseStatus,
    response_fault,
    usage_of,
)
from gateway.formats.events import Content, Failed, Finished, OutputDelta
from gateway.generation.group import ChoiceGroup
from gateway.generation.request import Choice
from gateway.http.client_socket import Outlet
from gateway.observe.timings import timings_of_group
from gateway.store.runs import DetachedRun
from gateway.text.logprobs import ChatLogprob, chat_logprobs
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs
from protocol.wire.errors import ServingError

MAX_WAITING = 64
"""Maximum number of tokens that are kept until their text arrives. Older ones are dropped."""
_STATUSES: Mapping[str, ResponseStatus] = {
    "stop": "completed",
    "tool_calls": "completed",
    "length": "incomplete",
    "abort": "cancelled",
}
"""Finish reason -> the response's status."""
StoreResponse = Callable[[ResponseObject], ResponseObject]
"""Stores the final response, unless the request set `store` to false, and returns the response to
send. Its `store` is false if the response could not be stored. The call blocks."""


class FrameWriter(Protocol):
    """The destination of a response's frames. No method may block.

    start  called when a queued response starts
    write  receives the frames, one or more at a time
    close  receives the final response and the sequence number of the last event; the writer makes
           the frame of this event
    """

    def start(self, response: ResponseObject) -> None: ...
    def write(self, frames: list[Frame]) -> None: ...
    def close(self, response: ResponseObject, number: int) -> None: ...


class StreamFrameWriter:
    """Writes frames to the client's stream. Calls `store` before it sends the last event."""

    def __init__(self, outlet: Outlet, store: StoreResponse) -> None:
        self._outlet = outlet
        self._store = store

    def start(self, response: ResponseObject) -> None:
        pass

    def write(self, frames: list[Frame]) -> None:
        self._outlet.write(b"".join(frames))

    def close(self, response: ResponseObject, number: int) -> None:
        gevent.spawn(self._end, response, number)

    def _end(self, response: ResponseObject, number: int) -> None:
        """Store the response and send the last event. That event repeats the whole response, so it
        may be large. It is sent only after the client has read all earlier events."""
        try:
            response = self._store(response)
        except BaseException:
            self._outlet.cut()  # otherwise the client would wait forever
            raise
        self._outlet.wait_drained()
        self._outlet.write(last_frame(number, response))
        self._outlet.finish()


class WholeResponseWriter:
    """Stores the final response in an attribute and ignores the frames."""

    response: ResponseObject

    def start(self, response: ResponseObject) -> None:
        pass

    def write(self, frames: list[Frame]) -> None:
        pass

    def close(self, response: ResponseObject, number: int) -> None:
        self.response = response


class RunFrameWriter:
    """Writes frames to a detached run. Its response is in the store from the start."""

    def __init__(self, run: DetachedRun) -> None:
        self._run = run

    def start(self, response: ResponseObject) -> None:
        self._run.set_body(encode(response))

    def write(self, frames: list[Frame]) -> None:
        self._run.write(frames)

    def close(self, response: ResponseObject, number: int) -> None:
        self._run.close([last_frame(number, response)], encode(response))


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
            self._frame_writer.start(self._events.response.in_status("in_progress"))
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

    def _logprobs_of(self, delta: OutputDelta) -> Iterator[list[ChatLogprob]]:
        """Return an iterator over the logprobs of each Content event."""
        if self._logprobs is None:
            return repeat([])
        texts = [event.text for event in delta.events if isinstance(event, Content)]
        return iter(self._logprobs.for_texts(delta.logprobs, texts))

    def end(self) -> None:
        cut_off = IncompleteDetails("max_output_tokens") if self._reason == "length" else None
        self._close(_STATUSES[self._reason], incomplete=cut_off)

    def cancel(self) -> None:
        """End the response as cancelled."""
        self._close("cancelled")

    def fail(self, error: ServingError) -> None:
        self._close("failed", error=response_fault(error))

    def _close(self, status: ResponseStatus, **why: Any) -> None:
        if not self._is_over:
            self._is_over = True
            events = self._events
            usage, timings = usage_of(self._group), timings_of_group(self._group)
            response = events.end(status, usage=usage, timings=timings, **why)
            if frames := events.pop_frames():
                self._frame_writer.write(frames)
            self._frame_writer.close(response, events.next_number)


class TextLogprobs:
    """The logprobs of one response's text, in the shape of `output_text`.

    Each token is reported with the text that it spells. Tokens of markup and reasoning, and stop
    tokens, are omitted, because they spell no text of the answer. Text may be emitted later than
    its tokens (blanks, incomplete characters). So the tokens after the last text are kept for the
    next text.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._waiting: list[TokenLogprobs] = []

    def for_texts(
        self, entries: Sequence[TokenLogprobs], texts: Sequence[str]
    ) -> list[list[ChatLogprob]]:
        """Return the logprobs for each of the `texts` of a delta. `entries` are its tokens.

        The tokens of a text are searched backwards from the end, because the reasoning before the
        text may contain the same words.
        """
        known = [*self._waiting[-MAX_WAITING:], *entries]
        self._waiting = known
        found: list[list[ChatLogprob]] = []
        end = len(known)
        for text in reversed(texts):
            window = self._window(known[:end], text.encode())
            if window is None:  # a stop string was cut off: use all new tokens
                window = (min(end, len(known) - len(entries)), end)
            if not found:
                self._waiting = known[window[1] :]
            end = window[0]
            entries_of_text = known[slice(*window)]
            found.append(chat_logprobs(self._tokenizer, entries_of_text, num_top=self._num_top))
        return found[::-1]

    def _window(self, known: Sequence[TokenLogprobs], wanted: bytes) -> tuple[int, int] | None:
        """Return the range of the last consecutive tokens that spell `wanted`, or None."""
        spelled = [self._tokenizer.token_bytes(entry.token_id) for entry in known]
        for end in range(len(spelled), 0, -1):
            left = len(wanted)
            for start in range(end - 1, -1, -1):
                if not wanted.endswith(spelled[start], 0, left):
                    break
                left -= len(spelled[start])
                if not left:
                    return start, end
        return None
