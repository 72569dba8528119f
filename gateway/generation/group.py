"""Sends all choices of one HTTP request to the engine, parses the output and emits it to a sink.

Invariants of a `ChoiceGroup`:

- A sink gets nothing until the engine has accepted every choice. If one is refused, the others are
  aborted.
- A sink gets each choice's deltas in order. Then exactly one of its methods `end` and `fail` is
  called. After the client has disconnected, the sink gets nothing more.
- Until a sink is attached, events are buffered.
- While the client does not read (`detach`), output waits unparsed (`PendingOutput`). It is counted
  on arrival, and output that may end a choice is parsed on arrival.
- After `close`, none of the choices is open in the engine.

A stream and a whole answer differ only in the sink: `CollectSink` collects the events of a whole
answer. The engine's reports are processed in gevent's hub, so sinks must not block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack, cast

from gevent.event import Event

from gateway.engine.base import Report, RequestSender, RoutedEncodeOptions, RoutedOptions
from gateway.formats.events import Failed, Finished
from gateway.generation.request import (
    Choice,
    MeasuredParser,
    PromptRequest,
    lowered_max_tokens,
)
from gateway.generation.sinks import BufferSink, NullSink, PendingOutput, Sink
from gateway.generation.timeline import Timeline, TimelineMoment
from protocol.engine.encoding import EncodeInputs
from protocol.engine.messages import Accepted, Output, Refused
from protocol.engine.timeline import AbortReason
from protocol.wire.arrays import Int32
from protocol.wire.errors import EngineError, ErrorInfo, ServingError, error_from

log = logging.getLogger(__name__)


ABORT_REASONS: dict[str | None, AbortReason] = {
    "disconnected": "disconnected",
    "cancelled": "cancelled",
}
"""Finish reason of an answer whose open choices are aborted -> reason of the abort. With any other
finish reason it is "error"."""


class ClientGone(Exception):
    """The client disconnected, so no response is needed."""


class ChoiceGroup:
    """All choices of one HTTP request. The owner must call `close`, however the request ends.

    max_len   most tokens of prompt and answer together, for the warning about `max_tokens`; None:
              no warning
    timeline  the timeline of the HTTP request
    on_free   called when the engine has released the resources of a choice after a disconnect, with
              the seconds since the disconnect
    options   the options with which all choices are sent to the engine
    """

    def __init__(
        self,
        engine: RequestSender,
        prompt_requests: Sequence[PromptRequest],
        *,
        max_len: int | None = None,
        timeline: Timeline | None = None,
        on_free: Callable[[float], None] = lambda seconds: None,
        **options: Unpack[RoutedOptions],
    ) -> None:
        self.prompt_requests = prompt_requests
        self.timeline = timeline or Timeline()
        self.choices: list[Choice] = []
        for prompt_index, prompt_request in enumerate(prompt_requests):
            for params in prompt_request.choices:
                new_counter = prompt_request.new_reasoning_counter
                choice = Choice(
                    index=len(self.choices),
                    prompt_index=prompt_index,
                    prompt_request=prompt_request,
                    params=params,
                    parser=prompt_request.parser_factory.new(),
                    reasoning_counter=new_counter() if new_counter else None,
                )
                if max_len is not None:
                    choice.warning = lowered_max_tokens(prompt_request, params, max_len)
                self.choices.append(choice)
        #: The answer's finish reason: that of the choice that ended last, "error", "cancelled" or
        #: "disconnected"; None before the first choice has ended.
        self.finish: str | None = None
        #: Whether the client has disconnected.
        self.is_gone = False
        self._has_tokens = False
        self._engine = engine
        self._options = options
        self._on_free = on_free
        #: Not an exception, because a raised one would hold the frames that hold this group.
        self._error: ErrorInfo | None = None
        self._num_unaccepted = len(self.choices)
        self._num_open = len(self.choices)
        self._buffer = BufferSink()
        self._pending = PendingOutput()
        self._sink: Sink = self._buffer
        self._attached: Sink | None = None  # the sink that was attached last, if there was one
        self._accepted = Event()
        self._started = Event()
        self._ended = Event()

    # ---- called in the request's greenlet

    def measure_parsing(self) -> None:
        """Measure the time of the parsers, for `parsing_s`. Call this before `open`."""
        for choice in self.choices:
            choice.parser = MeasuredParser(choice.parser)

    def open(self) -> None:
        """Send all choices and wait until the engine has accepted them. Raises the engine's refusal
        or another error that occurred before the first token. Raises ClientGone if the client has
        disconnected."""
        self.timeline.note(TimelineMoment.SENT)
        prompts = [Int32.of(prompt_request.prompt_ids) for prompt_request in self.prompt_requests]
        for choice in self.choices:
            request = choice.prompt_request
            if request.encode is not None:
                self._send_encode(choice, request.encode)
                continue
            options: RoutedOptions = {
                **self._options,
                "grammar": request.grammar,
                "kv_readers": request.kv_readers,
                "kv_handle": request.kv_handle,
                "is_first": choice.index == 0,
            }
            if request.images.attachments:
                options["attachments"] = [*request.images.attachments]
                options["contents"] = request.images.by_digest
            prompt, on_report = prompts[choice.prompt_index], partial(self.on_report, choice)
            choice.request = self._engine.generate(prompt, choice.params, on_report, **options)
        self._accepted.wait()
        self._raise_refusal()

    def _send_encode(self, choice: Choice, inputs: EncodeInputs) -> None:
        """Send the engine an encoding request (for an embedding or a score), with only the options
        that such requests have."""
        names = RoutedEncodeOptions.__optional_keys__
        options = {name: value for name, value in self._options.items() if name in names}
        own = cast(RoutedEncodeOptions, options)
        choice.request = self._engine.encode(inputs, partial(self.on_report, choice), **own)

    def wait_started(self) -> None:
        """Wait for the first token of any choice, or for the end of all choices. Raises an error
        that occurred before the first token. Raises ClientGone if the client has disconnected."""
        self._started.wait()
        self._raise_refusal()

    def attach(self, sink: Sink) -> None:
        """Emit the buffered events to `sink`. Until `detach`, emit later events on arrival.

        If `sink` is detached while it handles a buffered event, the next ones are held back too.
        Nothing is emitted if the client has disconnected.
        """
        if self.is_gone:
            return
        self._sink = self._attached = sink
        self.timeline.note_read()
        self._buffer.drain(lambda: self._sink)
        while self._sink is sink and self._pending.emit_next(sink):
            pass

    def detach(self) -> None:
        """Hold output back until a sink is attached again, because the client does not read. The
        sink's outlet may call this while the sink handles an event."""
        if not self.is_gone:
            self._sink = self._pending
            self.timeline.note_unread()

    def wait(self) -> None:
        """Wait until all choices have ended. Raises the error if one failed, or ClientGone."""
        self._ended.wait()
        self._raise_error()

    def _raise_refusal(self) -> None:
        """Raise an error that occurred before the first token. The sink gets later errors."""
        if self.is_gone or self._num_unaccepted or not self._has_tokens:
            self._raise_error()

    def _raise_error(self) -> None:
        if self.is_gone:
            raise ClientGone
        if self._error is not None:
            raise error_from(self._error)

    def close(self) -> None:
        """Abort the choices that are still open, and emit nothing more. The owner must call this in
        all cases. The sink is dropped, because it may refer to this group."""
        self._end()
        self._sink, self._attached = NullSink(), None
        self._buffer, self._pending = BufferSink(), PendingOutput()

    def _end(self) -> None:
        """Abort the choices that are still open, and end all waits. A sink that is attached later
        still gets the buffered events."""
        self.timeline.note(TimelineMoment.ANSWERED)
        freed = partial(self._note_free, time.monotonic()) if self.is_gone else None
        reason = ABORT_REASONS.get(self.finish, "error")
        for choice in self.choices:
            if not choice.is_ended:
                choice.is_ended = True
                self._engine.abort(choice.request, reason, on_freed=freed)
        self._accepted.set()
        self._started.set()
        self._ended.set()

    def _note_free(self, gone_at: float) -> None:
        self._on_free(time.monotonic() - gone_at)

    # ---- called anywhere, also in the hub

    def abandon(self) -> None:
        """Abort the open choices and emit nothing more, because the client has disconnected."""
        if not self._ended.is_set():
            self.is_gone = True
            self.finish = "disconnected"
            self.close()

    def fail(self, error: ServingError) -> None:
        """Abort the open choices and end the answer with `error`."""
        if not self._ended.is_set():
            self._error = error.info()
            self.finish = "error"
            self._end()
            self._sink.fail(error)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt_request.prompt_ids) for prompt_request in self.prompt_requests)

    @property
    def num_cached_tokens(self) -> int:
        """Number of cached prompt tokens. Each prompt is counted once, with the number of the
        choice that found the most."""
        most = [0] * len(self.prompt_requests)
        for choice in self.choices:
            most[choice.prompt_index] = max(most[choice.prompt_index], choice.num_cached)
        return sum(most)

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_generated for choice in self.choices)

    @property
    def num_predictions(self) -> tuple[int, int]:
        """The number of accepted and the number of rejected draft tokens."""
        accepted = sum(choice.num_accepted for choice in self.choices)
        return accepted, sum(choice.num_drafts for choice in self.choices) - accepted

    @property
    def parsing_s(self) -> float | None:
        """Seconds spent in the parsers of all choices; None if this is not measured."""
        parsers = [choice.parser for choice in self.choices]
        spent = [parser.spent_s for parser in parsers if isinstance(parser, MeasuredParser)]
        return sum(spent) if spent else None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The reasoning tokens of all choices; None if they cannot be counted."""
        counters = [choice.reasoning_counter for choice in self.choices]
        return sum(c.count for c in counters if c) if all(counters) else None

    # ---- called by the engine client, in the hub

    def on_report(self, choice: Choice, report: Report) -> None:
        """Handle a report of the engine. An exception in the handling fails only this request."""
        try:
            if type(report) is Output:
                if self._sink is self._pending:
                    self._hold(choice, report)
                else:
                    self._on_output(choice, report)
            elif type(report) is Accepted:
                self._on_accepted(choice)
            elif type(report) is Refused:
                choice.is_ended = True
                self.fail(error_from(report.error))
        except Exception:
            log.exception("parsing the output of a request failed")
            self.fail(EngineError("parsing the model's output failed"))

    def _on_accepted(self, choice: Choice) -> None:
        if not choice.is_accepted:
            choice.is_accepted = True
            self._num_unaccepted -= 1
            if not self._num_unaccepted:
                self.timeline.note(TimelineMoment.ACCEPTED)
                self._accepted.set()

    def _hold(self, choice: Choice, output: Output) -> None:
        """Keep `output` for a client that does not read. If too much output is pending, emit the
        pending output anyway. The outlet then buffers it, and disconnects the client when the
        outlet's buffer is full."""
        if self._pending.is_full and self._attached is not None:
            while self._pending.emit_next(self._attached):
                pass
        if output.finish is None and not choice.parser.may_stop:
            choice.count(output, 0)
            if output.usage is not None or not self._has_tokens:
                self._note_progress(choice, output)
            self._pending.hold(choice, output)
        else:
            self._pending.parse(choice)
            self._on_output(choice, output)

    def _on_output(self, choice: Choice, output: Output) -> None:
        """Parse `output`, count it and emit its events."""
        delta = choice.parser.push(output)
        choice.count(output, delta.num_after_end)
        if output.usage is not None or not self._has_tokens:
            self._note_progress(choice, output)
        events = delta.events
        if not events and not delta.token_ids:
            return
        last = events[-1] if events else None
        if choice.prompt_request.tool_choice_check is not None:
            choice.warn_if_unmet(choice.prompt_request.tool_choice_check, delta)
        if choice.warning is not None and type(last) is Finished:
            events.insert(-1, choice.warning)
        self._sink.delta(choice, delta)
        if type(last) is Finished:
            if not self._ended.is_set():  # the sink may have disconnected the client
                self._finish(choice, output, last.reason)
        elif type(last) is Failed and not self._ended.is_set():
            choice.is_ended = True
            choice.finish = "error"
            self.fail(error_from(last.error))

    def _note_progress(self, choice: Choice, output: Output) -> None:
        """Record the time of the group's first token, and the time of a usage that is reported
        before the last output."""
        if output.tokens and not self._has_tokens:
            self._has_tokens = True
            self.timeline.note(TimelineMoment.FIRST_TOKEN)
            self._started.set()
        if output.usage is not None:
            choice.usage_s = None if output.finish else self.timeline.now_s

    def _finish(self, choice: Choice, output: Output, reason: str) -> None:
        """End a choice. After the last choice, end the answer."""
        choice.is_ended = True
        choice.finish = self.finish = reason
        choice.ended_s = self.timeline.now_s
        if output.finish is None:  # a stop string ended the text, but the engine still generates
            self._engine.abort(choice.request, "complete")
        self._num_open -= 1
        if not self._num_open:
            self._sink.end()
            self._end()
