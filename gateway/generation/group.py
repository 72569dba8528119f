"""The middle of every route: ask the engine for all choices, read what comes, tell a sink.

An `ChoiceGroup` is n generations seen as one. Its laws:

- nothing is said before every choice is accepted; if one is refused, the others are aborted;
- a sink hears each choice's deltas in order and then exactly one of `end` and `fail`, or nothing
  more at all when the client has gone;
- while nobody listens yet, what is said waits; while the client takes nothing (`detach`), what is
  to be told waits unread (`untold`). Nothing else waits with it: all is counted, and ends, when it
  comes;
- after `close` none of its generations is open.

A stream and a whole answer differ in the sink alone: `CollectSink` keeps what it hears. Reports are
taken in the hub, so sinks must not block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from gevent.event import Event

from gateway.engine.base import EngineClient, Report
from gateway.formats.events import Failed, Finished
from gateway.generation.backpressure import PendingOutput
from gateway.generation.choice import Choice
from gateway.generation.request import PromptRequest
from gateway.generation.sinks import BufferSink, NullSink, Sink
from gateway.generation.timeline import Timeline, TimelineMoment
from gateway.http.timeouts import UNLIMITED, RequestTimeouts
from protocol.arrays import Int32
from protocol.errors import EngineError, ServingError, error_from
from protocol.messages import Accepted, Account, Output, Refused
from protocol.session import GenerateOptions

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client hung up: there is nobody to answer."""


class ChoiceGroup:
    """All choices of one HTTP request. `close` it, whatever happens.

    labels   names by which anyone may have the engine abort all of it
    account  who pays for it
    journal  of its request
    on_free  is told how long it took until the engine had back what a choice owned whose client
             had gone
    patience  how long it may take
    """

    def __init__(
        self,
        engine: EngineClient,
        asks: Sequence[PromptRequest],
        *,
        namespace: str = "",
        priority: int = 0,
        labels: Sequence[str] = (),
        account: Account | None = None,
        journal: Timeline | None = None,
        on_free: Callable[[float], None] = lambda seconds: None,
        patience: RequestTimeouts = UNLIMITED,
    ) -> None:
        self.asks = asks
        self.journal = journal or Timeline()
        self.choices: list[Choice] = []
        for place, ask in enumerate(asks):
            for params in ask.choices:
                meter = ask.new_meter() if ask.new_meter else None
                choice = Choice(len(self.choices), place, ask, params, ask.readers.new(), meter)
                self.choices.append(choice)
        self._has_spoken = False
        self.finish: str | None = None  # for the log: the last choice's reason, or our own word
        self.is_gone = False
        self._engine = engine
        self._terms: GenerateOptions = {
            "namespace": namespace,
            "priority": priority,
            "labels": list(labels),
            "account": account,
            "timeout_s": patience.timeout_s,
            "queue_timeout_s": patience.queue_timeout_s,
        }
        self._on_free = on_free
        self._error: ServingError | None = None
        self._num_unaccepted = len(self.choices)
        self._num_open = len(self.choices)
        self._early = BufferSink()
        self._untold = PendingOutput()
        self._sink: Sink = self._early
        self._listener: Sink | None = None  # who was attached last
        self._accepted = Event()
        self._begun = Event()
        self._ended = Event()

    # ---- for the request's greenlet

    def open(self) -> None:
        """Send everything and wait until the engine has accepted all of it.

        Raises what the engine says against it, or ClientGone.
        """
        self.journal.note(TimelineMoment.ASKED)
        prompts = [Int32.of(ask.prompt_ids) for ask in self.asks]
        for choice in self.choices:
            terms: GenerateOptions = {
                **self._terms,
                "grammar": choice.ask.grammar,
                "kv_readers": choice.ask.kv_readers,
                "kv_handle": choice.ask.kv_handle,
                "is_first": choice.index == 0,
            }
            prompt, take = prompts[choice.prompt_index], partial(self.take, choice)
            choice.request = self._engine.generate(prompt, choice.params, take, **terms)
        self._accepted.wait()
        self._raise_refusal()

    def wait_begun(self) -> None:
        """Until the engine has told the first token of any choice, or the end. Raises what the
        engine says instead of a token, or ClientGone."""
        self._begun.wait()
        self._raise_refusal()

    def attach(self, sink: Sink) -> None:
        """Tell `sink` what waits, and from now on everything at once, until it is detached.

        It hears nothing where the client has gone in the meantime.
        """
        if self.is_gone:
            return
        self._sink = self._listener = sink
        self._early.tell(sink)
        while self._sink is sink and self._untold.tell(sink):
            pass

    def detach(self) -> None:
        """The sink's client takes nothing: what comes waits until the sink is attached again. A
        sink may call this, through what it writes to, while it is told something."""
        if not self.is_gone:
            self._sink = self._untold

    def wait(self) -> None:
        """Until the end. Raises what made it fail, or ClientGone."""
        self._ended.wait()
        self._raise_troubles()

    def _raise_refusal(self) -> None:
        """What failed later has tokens, and its sink tells them."""
        if self.is_gone or self._num_unaccepted or not self._has_spoken:
            self._raise_troubles()

    def _raise_troubles(self) -> None:
        if self.is_gone:
            raise ClientGone
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Abort what is open. Whoever made the answer calls this, however it went."""
        self.journal.note(TimelineMoment.ANSWERED)
        freed = partial(self._note_free, time.monotonic()) if self.is_gone else None
        for choice in self.choices:
            if not choice.is_ended:
                choice.is_ended = True
                self._engine.abort(choice.request, freed)
        self._accepted.set()
        self._begun.set()
        self._ended.set()

    def _note_free(self, gone_at: float) -> None:
        self._on_free(time.monotonic() - gone_at)

    # ---- for anyone, the hub included

    def abandon(self) -> None:
        """The client has gone: abort what is open, say nothing more."""
        if not self._ended.is_set():
            self.is_gone = True
            self.finish = "disconnected"
            self._sink, self._early, self._untold = NullSink(), BufferSink(), PendingOutput()
            self.close()

    def fail(self, error: ServingError) -> None:
        """End it now; `error` is its end."""
        if not self._ended.is_set():
            self._error = error
            self.finish = "error"
            self.close()
            self._sink.fail(error)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(ask.prompt_ids) for ask in self.asks)

    @property
    def num_cached_tokens(self) -> int:
        """Of each prompt once, however many choices it has: what the luckiest of them found."""
        best = [0] * len(self.asks)
        for choice in self.choices:
            place = choice.prompt_index
            best[place] = max(best[place], choice.num_cached)
        return sum(best)

    @property
    def num_generated_tokens(self) -> int:
        return sum(choice.num_generated for choice in self.choices)

    @property
    def num_predictions(self) -> tuple[int, int]:
        """Tokens that were guessed ahead: how many are in the answers, and how many are not."""
        accepted = sum(choice.num_accepted for choice in self.choices)
        return accepted, sum(choice.num_drafts for choice in self.choices) - accepted

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None where they cannot be counted."""
        meters = [choice.meter for choice in self.choices]
        return sum(meter.count for meter in meters if meter) if all(meters) else None

    # ---- for the engine client, in the hub

    def take(self, choice: Choice, report: Report) -> None:
        """The per-request boundary: whatever goes wrong with one answer stays with it."""
        try:
            if type(report) is Output:
                if self._sink is self._untold:
                    self._wait(choice, report)
                else:
                    self._output(choice, report)
            elif type(report) is Accepted:
                self._accept(choice)
            elif type(report) is Refused:
                choice.is_ended = True
                self.fail(error_from(report.error))
        except Exception:
            log.exception("reading an answer failed")
            self.fail(EngineError("reading the answer failed"))

    def _accept(self, choice: Choice) -> None:
        if not choice.is_accepted:
            choice.is_accepted = True
            self._num_unaccepted -= 1
            if not self._num_unaccepted:
                self.journal.note(TimelineMoment.ACCEPTED)
                self._accepted.set()

    def _wait(self, choice: Choice, output: Output) -> None:
        """What is too much to wait is told a client that does not read, too: what it is written to
        bounds what waits there (`connection`)."""
        if self._untold.is_much and self._listener is not None:
            while self._untold.tell(self._listener):
                pass
        if output.finish is None and not choice.reader.may_stop:
            choice.count(output, 0)
            if output.usage is not None or not self._has_spoken:
                self._note_told(choice, output)
            self._untold.keep(choice, output)
        else:
            self._untold.read(choice)
            self._output(choice, output)

    def _output(self, choice: Choice, output: Output) -> None:
        delta = choice.reader.push(output)
        choice.count(output, delta.num_behind)
        if output.usage is not None or not self._has_spoken:
            self._note_told(choice, output)
        events = delta.events
        if not events and not delta.token_ids:
            return
        last = events[-1] if events else None
        if choice.ask.demand is not None:
            choice.judge(choice.ask.demand, delta)
        self._sink.delta(choice, delta)
        if type(last) is Finished:
            if not self._ended.is_set():  # the sink has cut off a client that does not read
                self._finish(choice, output, last.reason)
        elif type(last) is Failed and not self._ended.is_set():
            choice.is_ended = True
            choice.finish = "error"
            self.fail(error_from(last.error))

    def _note_told(self, choice: Choice, output: Output) -> None:
        if output.tokens and not self._has_spoken:
            self._has_spoken = True
            self.journal.note(TimelineMoment.FIRST_TOKEN)
            self._begun.set()
        if output.usage is not None:
            choice.told_s = None if output.finish else self.journal.now_s

    def _finish(self, choice: Choice, output: Output, reason: str) -> None:
        choice.is_ended = True
        choice.finish = self.finish = reason
        choice.ended_s = self.journal.now_s
        if output.finish is None:  # a stop string ended the text; the engine does not know
            self._engine.abort(choice.request, None)
        self._num_open -= 1
        if not self._num_open:
            self._sink.end()
            self.close()
