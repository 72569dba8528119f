"""The middle of every route: ask the engine for all choices, read what comes, tell a sink.

An `Answer` is n generations seen as one. Its laws:

- nothing is said before every choice is accepted; if one is refused, the others are aborted;
- a sink hears each choice's deltas in order and then exactly one of `end` and `fail`, or nothing
  more at all when the client has gone;
- after `close` none of its generations is open.

A stream and a whole answer differ in the sink alone: `Fold` keeps what it hears. Reports are taken
in the hub, so sinks must not block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
from gevent.event import Event

from gateway.engine_client import Report, Subscriber
from gateway.journal import Journal, Moment
from gateway.metering import ThinkingMeter
from gateway.output.events import Delta, Failed, Finished, ToolCall, ToolCallEnd, Warning
from gateway.patience import UNLIMITED, Patience
from protocol.arrays import Int32
from protocol.errors import EngineError, ServingError, error_from
from protocol.grammar import Grammar
from protocol.messages import Accepted, Account, Output, Refused, TokenLogprobs, Usage
from protocol.sampling import SamplingParams

log = logging.getLogger(__name__)


NOT_CALLED = "tool_choice_not_followed"


class ClientGone(Exception):
    """The client hung up: there is nobody to answer."""


class Reads(Protocol):
    """One choice, read. What is pushed after the end changes nothing."""

    def push(self, output: Output) -> Delta: ...


class Readers(Protocol):
    """What the choices of a prompt share. Makes one reader for each."""

    def new(self) -> Reads: ...


class Demand(msgspec.Struct, frozen=True):
    """The answer has to call a tool: the one of this name, or any."""

    name: str | None = None

    def unmet(self, called: Sequence[str]) -> Warning | None:
        """What to say of an answer that has ended by itself, and has called these."""
        if self.name is None and not called:
            return Warning(NOT_CALLED, "a tool call was required, and the model made none")
        if self.name is not None and set(called) != {self.name}:
            return Warning(NOT_CALLED, f"the model did not call {self.name!r} alone")
        return None


@dataclass(frozen=True, slots=True)
class Ask:
    """What one prompt needs: its tokens, the parameters of each of its choices, how they are read.

    new_meter  makes what counts the tokens of reasoning, where they can be counted
    demand     what the answer has to be, even where nothing forces it to
    grammar    what the engine lets it be
    kv_readers, kv_handle   see messages.Generate; with readers there is no answer but a handle
    """

    prompt_ids: list[int]
    choices: list[SamplingParams]
    readers: Readers
    new_meter: Callable[[], ThinkingMeter] | None = None
    demand: Demand | None = None
    grammar: Grammar | None = None
    kv_readers: int = 0
    kv_handle: str = ""


@dataclass(slots=True)
class Choice:
    """One of the answers. `index` counts over all prompts, `prompt_index` is its ask's place.

    finish   why it ended by itself; "" if it did not
    usage    as last told
    told_s   when that was, in seconds of the journal; None: with the engine's last word
    ended_s  when it ended by itself
    """

    index: int
    prompt_index: int
    ask: Ask
    params: SamplingParams
    reader: Reads
    meter: ThinkingMeter | None = None
    begun: str = ""  # the name of the last call
    called: list[str] = field(default_factory=list)  # names of complete calls; kept for a demand
    request: int = 0
    is_accepted: bool = False
    is_ended: bool = False
    finish: str = ""
    usage: Usage | None = None
    told_s: float | None = None
    ended_s: float | None = None
    num_generated: int = 0
    num_cached: int = 0
    num_drafts: int = 0  # as far as the engine has told: with the first tokens, and at the end
    num_accepted: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    kv_handle: str = ""


class Engine(Protocol):
    """What an answer needs of one: see `EngineClient`."""

    def generate(
        self,
        prompt: Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        *,
        namespace: str,
        priority: int,
        grammar: Grammar | None,
        labels: Sequence[str],
        kv_readers: int,
        kv_handle: str,
        account: Account | None,
        is_first: bool,
        timeout_s: float,
        queue_timeout_s: float,
    ) -> int: ...
    def abort(self, request: int, freed: Callable[[], None] | None) -> None: ...


class Sink(Protocol):
    """Called from the hub."""

    def delta(self, choice: Choice, delta: Delta) -> None: ...
    def end(self) -> None: ...
    def fail(self, error: ServingError) -> None: ...


class Answer:
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
        engine: Engine,
        asks: Sequence[Ask],
        *,
        namespace: str = "",
        priority: int = 0,
        labels: Sequence[str] = (),
        account: Account | None = None,
        journal: Journal | None = None,
        on_free: Callable[[float], None] = lambda seconds: None,
        patience: Patience = UNLIMITED,
    ) -> None:
        self.asks = asks
        self.journal = journal or Journal()
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
        self._namespace = namespace
        self._priority = priority
        self._labels = labels
        self._account = account
        self._on_free = on_free
        self._patience = patience
        self._error: ServingError | None = None
        self._num_unaccepted = len(self.choices)
        self._num_open = len(self.choices)
        self._sink: Sink | None = None
        self._early: list[Callable[[Sink], None]] = []
        self._accepted = Event()
        self._begun = Event()
        self._ended = Event()

    # ---- for the request's greenlet

    def open(self) -> None:
        """Send everything and wait until the engine has accepted all of it.

        Raises what the engine says against it, or ClientGone.
        """
        self.journal.note(Moment.ASKED)
        prompts = [Int32.of(ask.prompt_ids) for ask in self.asks]
        for choice in self.choices:
            choice.request = self._engine.generate(
                prompts[choice.prompt_index],
                choice.params,
                partial(self.take, choice),
                namespace=self._namespace,
                priority=self._priority,
                grammar=choice.ask.grammar,
                labels=self._labels,
                kv_readers=choice.ask.kv_readers,
                kv_handle=choice.ask.kv_handle,
                account=self._account,
                is_first=choice.index == 0,
                timeout_s=self._patience.timeout_s,
                queue_timeout_s=self._patience.queue_timeout_s,
            )
        self._accepted.wait()
        self._raise_refusal()

    def wait_begun(self) -> None:
        """Until the engine has told the first token of any choice, or the end. Raises what the
        engine says instead of a token, or ClientGone."""
        self._begun.wait()
        self._raise_refusal()

    def attach(self, sink: Sink) -> None:
        """Tell `sink` what was said so far, and from now on everything at once.

        It hears nothing where the client has gone in the meantime.
        """
        if self.is_gone:
            return
        early, self._early = self._early, []
        self._sink = sink
        for say in early:
            say(sink)

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
        self.journal.note(Moment.ANSWERED)
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
            self._sink, self._early = _Nobody(), []
            self.close()

    def fail(self, error: ServingError) -> None:
        """End it now; `error` is its end."""
        if not self._ended.is_set():
            self._error = error
            self.finish = "error"
            self.close()
            self._tell(lambda sink: sink.fail(error))

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
                self.journal.note(Moment.ACCEPTED)
                self._accepted.set()

    def _output(self, choice: Choice, output: Output) -> None:
        delta = choice.reader.push(output)
        self._count(choice, output, delta.num_behind)
        events = delta.events
        if not events and not delta.token_ids:
            return
        last = events[-1] if events else None
        if choice.ask.demand is not None:
            _judge(choice, choice.ask.demand, delta)
        if self._sink is not None:
            self._sink.delta(choice, delta)
        else:
            self._early.append(lambda sink: sink.delta(choice, delta))
        if type(last) is Finished:
            if not self._ended.is_set():  # the sink has cut off a client that does not read
                self._finish(choice, output, last.reason)
        elif type(last) is Failed and not self._ended.is_set():
            choice.is_ended = True
            choice.finish = "error"
            self.fail(error_from(last.error))

    def _count(self, choice: Choice, output: Output, num_behind: int) -> None:
        if output.tokens:
            tokens = output.tokens[: len(output.tokens) - num_behind]
            choice.num_generated += len(tokens)
            if choice.meter is not None:
                choice.meter.push(tokens)
            if not self._has_spoken:
                self._has_spoken = True
                self.journal.note(Moment.FIRST_TOKEN)
                self._begun.set()
        if output.usage is not None:
            choice.usage = output.usage
            choice.told_s = None if output.finish else self.journal.now_s
            # What another engine computed for this very request was not cached.
            choice.num_cached = output.usage.cached_tokens - output.usage.fetched_tokens
            choice.num_drafts = output.usage.draft_tokens
            choice.num_accepted = output.usage.accepted_tokens
        choice.kv_handle = output.kv_handle
        if output.prompt_logprobs:
            choice.prompt_logprobs = output.prompt_logprobs

    def _finish(self, choice: Choice, output: Output, reason: str) -> None:
        choice.is_ended = True
        choice.finish = self.finish = reason
        choice.ended_s = self.journal.now_s
        if output.finish is None:  # a stop string ended the text; the engine does not know
            self._engine.abort(choice.request, None)
        self._num_open -= 1
        if not self._num_open:
            self._tell(lambda sink: sink.end())
            self.close()

    def _tell(self, say: Callable[[Sink], None]) -> None:
        if self._sink is not None:
            say(self._sink)
        else:
            self._early.append(say)


def _judge(choice: Choice, demand: Demand, delta: Delta) -> None:
    """Before its end, an answer that is not what was demanded is told with a warning."""
    for event in delta.events:
        if isinstance(event, ToolCall):
            choice.begun = event.name
        elif isinstance(event, ToolCallEnd):
            choice.called.append(choice.begun)
    last = delta.events[-1]
    if isinstance(last, Finished) and last.reason in ("stop", "tool_calls"):
        warning = demand.unmet(choice.called)
        if warning is not None:
            delta.events.insert(-1, warning)


class _Nobody:
    """The sink of a client that has gone."""

    def delta(self, choice: Choice, delta: Delta) -> None:
        pass

    def end(self) -> None:
        pass

    def fail(self, error: ServingError) -> None:
        pass


class Fold:
    """The sink of a whole answer: each choice's deltas, joined into one."""

    def __init__(self, num_choices: int) -> None:
        self.whole = [Delta([], [], []) for _ in range(num_choices)]

    def delta(self, choice: Choice, delta: Delta) -> None:
        whole = self.whole[choice.index]
        whole.events.extend(delta.events)
        whole.token_ids.extend(delta.token_ids)
        whole.logprobs.extend(delta.logprobs)

    def end(self) -> None:
        pass

    def fail(self, error: ServingError) -> None:
        pass
