"""Sends all choices of one HTTP request to the engine, parses the output and emits it to a sink.

Invariants of a `ChoiceGroup`:

- nothing is emitted before every choice is accepted; if one is refused, the others are aborted;
- a sink gets each choice's deltas in order and then exactly one of `end` and `fail`, or nothing
  more after the client has disconnected;
- before a sink is attached, events are buffered. While the client does not read (`detach`), output
  waits unparsed (`PendingOutput`), but it is counted and ends the choice when it arrives;
- after `close` none of its requests is open in the engine.

A stream and a whole answer differ only in the sink: `CollectSink` collects the events. Reports are
processed in the hub, so sinks must not block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

from gevent.event import Event

from gateway.engine.base import Report, RequestSender
from gateway.formats.events import Failed, Finished
from gateway.generation.request import Choice, PromptRequest
from gateway.generation.sinks import BufferSink, NullSink, PendingOutput, Sink
from gateway.generation.timeline import Timeline, TimelineMoment
from protocol.arrays import Int32
from protocol.errors import EngineError, ServingError, error_from
from protocol.messages import Accepted, Output, Refused
from protocol.session import GenerateOptions

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client disconnected, so no response is needed."""


class ChoiceGroup:
    """All choices of one HTTP request. It must be closed in all cases.

    timeline  of the request
    on_free   called with the seconds from a client's disconnect until the engine has released the
              resources of a choice
    options   of all choices
    """

    def __init__(
        self,
        engine: RequestSender,
        prompt_requests: Sequence[PromptRequest],
        *,
        timeline: Timeline | None = None,
        on_free: Callable[[float], None] = lambda seconds: None,
        **options: Unpack[GenerateOptions],
    ) -> None:
        self.prompt_requests = prompt_requests
        self.timeline = timeline or Timeline()
        self.choices: list[Choice] = []
        for place, prompt_request in enumerate(prompt_requests):
            for params in prompt_request.choices:
                new_counter = prompt_request.new_reasoning_counter
                choice = Choice(
                    index=len(self.choices),
                    prompt_index=place,
                    prompt_request=prompt_request,
                    params=params,
                    parser=prompt_request.parser_factory.new(),
                    reasoning_counter=new_counter() if new_counter else None,
                )
                self.choices.append(choice)
        self._has_tokens = False
        self.finish: str | None = None  # for the log: the last choice's reason, "error" or similar
        self.is_gone = False
        self._engine = engine
        self._options = options
        self._on_free = on_free
        self._error: ServingError | None = None
        self._num_unaccepted = len(self.choices)
        self._num_open = len(self.choices)
        self._buffer = BufferSink()
        self._pending = PendingOutput()
        self._sink: Sink = self._buffer
        self._attached: Sink | None = None  # the sink that was attached last
        self._accepted = Event()
        self._started = Event()
        self._ended = Event()

    # ---- for the request's greenlet

    def open(self) -> None:
        """Send all choices and wait until the engine has accepted them.

        Raises the engine's refusal, or ClientGone.
        """
        self.timeline.note(TimelineMoment.ASKED)
        prompts = [Int32.of(prompt_request.prompt_ids) for prompt_request in self.prompt_requests]
        for choice in self.choices:
            request = choice.prompt_request
            options: GenerateOptions = {
                **self._options,
                "grammar": request.grammar,
                "kv_readers": request.kv_readers,
                "kv_handle": request.kv_handle,
                "is_first": choice.index == 0,
            }
            prompt, on_report = prompts[choice.prompt_index], partial(self.on_report, choice)
            choice.request = self._engine.generate(prompt, choice.params, on_report, **options)
        self._accepted.wait()
        self._raise_refusal()

    def wait_started(self) -> None:
        """Wait for the first token of any choice, or for the end.

        Raises the engine's error if it came instead of a token, or ClientGone.
        """
        self._started.wait()
        self._raise_refusal()

    def attach(self, sink: Sink) -> None:
        """Emit the buffered events to `sink`, and later events at once, until `detach`.

        Nothing is emitted if the client has disconnected in the meantime.
        """
        if self.is_gone:
            return
        self._sink = self._attached = sink
        self._buffer.drain(sink)
        while self._sink is sink and self._pending.emit_next(sink):
            pass

    def detach(self) -> None:
        """Hold output back until the sink is attached again, because its client does not read.

        A sink's outlet may call this while an event is emitted to the sink.
        """
        if not self.is_gone:
            self._sink = self._pending

    def wait(self) -> None:
        """Wait for the end. Raises the error that made it fail, or ClientGone."""
        self._ended.wait()
        self._raise_error()

    def _raise_refusal(self) -> None:
        """Raise an error that came before the first token. The sink emits later ones."""
        if self.is_gone or self._num_unaccepted or not self._has_tokens:
            self._raise_error()

    def _raise_error(self) -> None:
        if self.is_gone:
            raise ClientGone
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Abort the open choices. The owner calls this, however the request ended."""
        self.timeline.note(TimelineMoment.ANSWERED)
        freed = partial(self._note_free, time.monotonic()) if self.is_gone else None
        for choice in self.choices:
            if not choice.is_ended:
                choice.is_ended = True
                self._engine.abort(choice.request, freed)
        self._accepted.set()
        self._started.set()
        self._ended.set()

    def _note_free(self, gone_at: float) -> None:
        self._on_free(time.monotonic() - gone_at)

    # ---- for any caller, including the hub

    def abandon(self) -> None:
        """Abort the open choices and emit nothing more: the client has disconnected."""
        if not self._ended.is_set():
            self.is_gone = True
            self.finish = "disconnected"
            self._sink, self._buffer, self._pending = NullSink(), BufferSink(), PendingOutput()
            self.close()

    def fail(self, error: ServingError) -> None:
        """End the request now with `error`."""
        if not self._ended.is_set():
            self._error = error
            self.finish = "error"
            self.close()
            self._sink.fail(error)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt_request.prompt_ids) for prompt_request in self.prompt_requests)

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of all prompts. A prompt counts once, with the most that a choice found."""
        best = [0] * len(self.prompt_requests)
        for choice in self.choices:
            place = choice.prompt_index
            best[place] = max(best[place], choice.num_cached)
        return sum(best)

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_generated for choice in self.choices)

    @property
    def num_predictions(self) -> tuple[int, int]:
        """Numbers of accepted and of rejected draft tokens."""
        accepted = sum(choice.num_accepted for choice in self.choices)
        return accepted, sum(choice.num_drafts for choice in self.choices) - accepted

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None if they cannot be counted."""
        counters = [choice.reasoning_counter for choice in self.choices]
        return sum(c.count for c in counters if c) if all(counters) else None

    # ---- for the engine client, in the hub

    def on_report(self, choice: Choice, report: Report) -> None:
        """Handle a report of the engine. An exception fails this request only."""
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
        """Keep `output` for a client that does not read.

        If too much is pending, it is emitted all the same: the outlet bounds its own buffer and
        then disconnects the client.
        """
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
        self._sink.delta(choice, delta)
        if type(last) is Finished:
            if not self._ended.is_set():  # the sink may have disconnected a client
                self._finish(choice, output, last.reason)
        elif type(last) is Failed and not self._ended.is_set():
            choice.is_ended = True
            choice.finish = "error"
            self.fail(error_from(last.error))

    def _note_progress(self, choice: Choice, output: Output) -> None:
        if output.tokens and not self._has_tokens:
            self._has_tokens = True
            self.timeline.note(TimelineMoment.FIRST_TOKEN)
            self._started.set()
        if output.usage is not None:
            choice.usage_s = None if output.finish else self.timeline.now_s

    def _finish(self, choice: Choice, output: Output, reason: str) -> None:
        choice.is_ended = True
        choice.finish = self.finish = reason
        choice.ended_s = self.timeline.now_s
        if output.finish is None:  # a stop string ended the text, so the engine still generates
            self._engine.abort(choice.request, None)
        self._num_open -= 1
        if not self._num_open:
            self._sink.end()
            self.close()
