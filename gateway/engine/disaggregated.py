"""An engine client over two kinds of engines: P's compute prompts, D's go on from them.

Whoever asks sees one engine (the interface of `ZmqEngineClient`). Which engines, when, and what is
said to them is decided here; what a request owes to whom is `handover.py`'s table. The laws:

- the choices of a prompt that are asked for in one turn of the loop are computed once, for all;
- what P keeps is kept alive until D has told its first token, and then released, at once;
- where P refuses, fails or is lost, D computes all of it, unless the policy wants an error;
- without a P that is ready D computes all, whatever the policy; without a D nothing is served;
- all engines that are used have the model of the first D that is ready.

All methods are for the greenlets of one thread; reports come in gevent's hub.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import msgspec
from gevent import get_hub

from gateway.engine.client import ClientLine, Report, Subscriber, ZmqEngineClient
from gateway.engine.handoff import (
    Handoff,
    HandoffAction,
    HandoffEvent,
    HandoffState,
    as_one,
    was_computed_again,
)
from gateway.engine.pool import EnginePool
from gateway.engine.remote_prefill import RemotePrefill
from protocol.arrays import Int32
from protocol.errors import (
    EngineError,
    EngineLost,
    ErrorInfo,
    InvalidRequest,
    LimitReached,
    QueueTimeout,
    ServingError,
    TimedOut,
)
from protocol.kv import KV_FIELD
from protocol.messages import Aborted, Accepted, Limits, Output, Refused
from protocol.model_card import ModelCard
from protocol.sampling import SamplingParams
from protocol.session import GenerateOptions
from protocol.stats import EngineStats

log = logging.getLogger(__name__)

KEEP_EVERY_S = 0.25
"""Leases are looked at so often; they last a second at least."""
LIMITS = (LimitReached.code, QueueTimeout.code, TimedOut.code)
MIN_LEFT_S = 0.001
"""0 would be no limit."""
MIN_PROMPT = 2
"""The last token of a prompt is always D's."""


@dataclass(slots=True, eq=False)
class _Request:
    """One that is open.

    produce    where its prompt is computed; None: by D
    d, asked   whom D is, and its number there, once it was asked
    freed      whom to tell when D has back what it owned
    """

    number: int
    prompt: Int32
    params: SamplingParams
    subscriber: Subscriber
    terms: GenerateOptions
    handover: Handoff
    produce: RemotePrefill | None = None
    d: ZmqEngineClient | None = None
    asked: int = 0
    freed: Callable[[], None] | None = None
    came_at: float = field(default_factory=time.monotonic)


class DisaggregatedClient:
    """prefill, decode   the lines to them; the first D that is ready says which model it is
    min_tokens    shorter prompts are computed by D
    recomputes    D computes what P could not; else that is an error
    on_handover   called for each request with which D went on from P's K/V
    on_fallback   called with the cause for each that D computed although P should have
    """

    def __init__(
        self,
        prefill: Sequence[ZmqEngineClient],
        decode: Sequence[ZmqEngineClient],
        *,
        min_tokens: int,
        recomputes: bool,
        on_handover: Callable[[], None],
        on_fallback: Callable[[str], None],
    ) -> None:
        self.lines = [
            *(ClientLine("prefill", engine) for engine in prefill),
            *(ClientLine("decode", engine) for engine in decode),
        ]
        self._p, self._d = EnginePool("prefill", prefill), EnginePool("decode", decode)
        self._min_tokens = max(min_tokens, MIN_PROMPT)
        self._recomputes = recomputes
        self._on_handover, self._on_fallback = on_handover, on_fallback
        self._requests: dict[int, _Request] = {}
        self._produces: set[RemotePrefill] = set()
        self._forming: list[RemotePrefill] = []
        self._next_number = 1
        self._misses_p = False
        self._clock: Any = None

    # ---- life

    def start(self) -> None:
        """Connect, once. Called after the fork, in the process that will use the sockets."""
        if self._clock is None:
            for line in self.lines:
                line.engine.start()
            self._clock = get_hub().loop.timer(KEEP_EVERY_S, repeat=KEEP_EVERY_S)
            self._clock.start(self._keep)

    def close(self) -> None:
        """Leave; the engines abort what is open, and what was kept for it is released."""
        if self._clock is not None:
            self._clock.stop()
            self._clock.close()
            self._clock = None
        for number in list(self._requests):
            self.abort(number)
        for line in self.lines:
            line.engine.close()

    # ---- what it is, seen as one

    @property
    def is_ready(self) -> bool:
        return self._d.is_ready

    def trouble(self) -> ServingError | None:
        """Why no request can be opened now; None where one can."""
        return None if self.is_ready else self._d.first.trouble()

    @property
    def model(self) -> ModelCard | None:
        return self._d.first.model

    @property
    def limits(self) -> Limits | None:
        return self._d.first.limits

    @property
    def epoch(self) -> str | None:
        return self._d.first.epoch

    @property
    def silence_s(self) -> float | None:
        return self._d.first.silence_s

    @property
    def stats(self) -> EngineStats | None:
        return self._d.first.stats

    # ---- requests

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **terms: Unpack[GenerateOptions],
    ) -> int:
        """Open a request; `subscriber` is called with each report until its end. Its number.

        Raises EngineNotReady or EngineLost where there is no D to ask, and InvalidRequest where
        somebody else wants to do what is done here.
        """
        if terms.pop("kv_readers", 0) or terms.pop("kv_handle", ""):
            raise InvalidRequest(f"{KV_FIELD}: this server routes by itself", param=KV_FIELD)
        self.start()
        self._choose_d()  # raises now rather than when P has computed the prompt
        ids = prompt if isinstance(prompt, Int32) else Int32.of(prompt)
        produce = self._produce(ids, terms) if self._is_worth_it(ids, params) else None
        handover = Handoff(HandoffState.GOING if produce is None else HandoffState.COMPUTING)
        request = _Request(self._next_number, ids, params, subscriber, terms, handover, produce)
        self._next_number += 1
        if produce is None:
            self._ask(request)
        else:
            produce.readers.add(request.number)
        self._requests[request.number] = request
        return request.number

    def abort(self, request: int, freed: Callable[[], None] | None = None) -> None:
        """End `request` if it is open; its subscriber hears nothing more. `freed` is called when D
        has back what it owned, if D had it."""
        found = self._requests.get(request)
        if found is not None:
            found.freed = freed
            self._on(found, HandoffEvent.ABORT)

    def abort_named(self, names: Sequence[str]) -> Aborted:
        """End every request that has one of these labels, of whichever client, and wait until all
        engines have said which there were. P's are asked first: what they have handed over by then
        D's have heard of.

        Raises EngineNotReady or EngineLost where there is no D to ask.
        """
        self.start()
        aborted: set[str] = set()
        for engine in self._p.engines:
            with contextlib.suppress(EngineError):  # one that is gone has nothing open
                aborted.update(engine.abort_named(names).aborted)
        self._choose_d()
        for engine in self._d.engines:
            if engine.is_ready:
                aborted.update(engine.abort_named(names).aborted)
        return Aborted(
            request=0,
            aborted=[name for name in names if name in aborted],
            unknown=[name for name in names if name not in aborted],
        )

    # ---- choosing

    def _is_worth_it(self, prompt: Int32, params: SamplingParams) -> bool:
        return (
            len(prompt) >= self._min_tokens
            and params.prompt_logprobs is None
            and params.max_tokens != 0
        )

    def _produce(self, prompt: Int32, terms: GenerateOptions) -> RemotePrefill | None:
        """The one that this turn's requests for `prompt` share. None: there is no P."""
        for forming in self._forming:
            if forming.is_for(prompt, terms):
                return forming
        try:
            engine = self._p.choose(self.model, self._waiting_tokens)
        except EngineError as error:
            self._on_fallback("no_prefill")
            if not self._misses_p:
                self._misses_p = True
                log.warning("no prefill engine: prompts are computed by decode engines (%s)", error)
            return None
        self._misses_p = False
        if not self._forming:
            get_hub().loop.run_callback(self._launch)
        produce = RemotePrefill(engine, prompt, terms, self._computed)
        self._forming.append(produce)
        self._produces.add(produce)
        return produce

    def _choose_d(self) -> ZmqEngineClient:
        return self._d.choose(self.model, self._load)

    def _waiting_tokens(self, p: ZmqEngineClient) -> int:
        """By its own word of the last heartbeat, and what we have open there, perhaps since."""
        ours = (len(produce.prompt) for produce in self._produces if produce.p is p)
        return sum(ours) + (p.stats.waiting_tokens if p.stats else 0)

    def _load(self, d: ZmqEngineClient) -> int:
        ours = sum(request.d is d for request in self._requests.values())
        return ours + (d.stats.running + d.stats.waiting if d.stats else 0)

    # ---- what happens

    def _launch(self) -> None:
        """At the end of the turn: nobody joins any more."""
        forming, self._forming = self._forming, []
        for produce in forming:
            produce.ask()
            if not produce.readers:
                self._produces.discard(produce)

    def _keep(self) -> None:
        now = time.monotonic()
        for produce in self._produces:
            produce.keep(now)

    def _computed(self, produce: RemotePrefill, report: Report) -> None:
        """P's last word."""
        event, cause = HandoffEvent.COMPUTED, ""
        if not produce.handle:
            event, cause = self._event_of(report)
        for number in sorted(produce.readers):
            if cause:
                self._on_fallback(cause)
            self._on(self._requests[number], event, report)

    def _event_of(self, report: Report) -> tuple[HandoffEvent, str]:
        """Of an end without a handle; with the cause, where D shall compute it."""
        error = _error_of(report)
        if error is None or not self._recomputes:  # aborted by name, or as the policy has it
            return HandoffEvent.STOPPED, ""
        if error.code in LIMITS:  # it would be no limit if D helped out
            return HandoffEvent.STOPPED, ""
        causes = {True: "refused", False: "failed"}
        is_lost = error.code == EngineLost.code
        return HandoffEvent.MISSED, "lost" if is_lost else causes[isinstance(report, Refused)]

    def _hear(self, request: _Request, report: Report) -> None:
        """What D says."""
        match report:
            case Accepted():
                self._on(request, HandoffEvent.ACCEPTED, report)
            case Refused(error=error) if self._recomputes and self._was_handle(request, error):
                log.warning("a decode engine refused a handle: %s", error.message)
                self._on_fallback("handle")
                self._on(request, HandoffEvent.UNUSABLE, report)
            case Output():
                told = self._as_one(request, report)
                event = HandoffEvent.SPOKE if report.finish is None else HandoffEvent.FINISHED
                self._on(request, event, told)
            case _:
                self._on(request, HandoffEvent.FINISHED, report)

    def _was_handle(self, request: _Request, error: ErrorInfo) -> bool:
        return request.handover.state is HandoffState.ASKED and error.param == KV_FIELD

    def _as_one(self, request: _Request, output: Output) -> Output:
        """What D and P did, as one engine would tell it."""
        produce, usage = request.produce, output.usage
        if produce is None or usage is None:
            return output
        if request.handover.state is HandoffState.TAKEN and request.d is not None:
            limits = request.d.limits
            if limits is not None and was_computed_again(usage, limits.block_tokens):
                self._on_fallback("fetch")
            else:
                self._on_handover()
        return msgspec.structs.replace(output, usage=as_one(usage, produce.usage))

    # ---- what is done about it

    def _on(self, request: _Request, event: HandoffEvent, report: Report | None = None) -> None:
        deeds = request.handover.on(event)
        if request.handover.state is HandoffState.ENDED:
            self._requests.pop(request.number, None)
        for deed in deeds:
            self._do(deed, request, report)

    def _do(self, deed: HandoffAction, request: _Request, report: Report | None) -> None:
        produce = request.produce
        match deed:
            case HandoffAction.ASK if produce is not None:
                self._ask_or_fail(request, produce.handle)
            case HandoffAction.ASK_ALL:
                request.produce = None
                self._ask_or_fail(request, "")
            case HandoffAction.TELL if report is not None:
                request.subscriber(report)
            case HandoffAction.LEAVE if produce is not None:
                produce.leave(request.number)
                if not produce.readers:
                    self._produces.discard(produce)
            case HandoffAction.ABORT if request.d is not None:
                request.d.abort(request.asked, request.freed)

    def _ask_or_fail(self, request: _Request, handle: str) -> None:
        try:
            self._ask(request, handle)
        except EngineError as error:
            end = Output(request=request.number, finish="error", error=error.info())
            self._on(request, HandoffEvent.FINISHED, end)

    def _ask(self, request: _Request, handle: str = "") -> None:
        d = self._choose_d()
        terms: GenerateOptions = {
            **request.terms,
            **self._time_left(request, has_begun=bool(handle)),
        }
        terms["kv_handle"] = handle
        hear = partial(self._hear, request)
        request.asked = d.generate(request.prompt, request.params, hear, **terms)
        request.d = d

    def _time_left(self, request: _Request, *, has_begun: bool) -> GenerateOptions:
        """Of its limits, which count from when it came. What P has computed waits no more for its
        beginning."""
        gone_s = time.monotonic() - request.came_at
        limit_s = request.terms.get("timeout_s", 0.0)
        queue_limit_s = 0.0 if has_begun else request.terms.get("queue_timeout_s", 0.0)
        return {
            "timeout_s": _left(limit_s, gone_s),
            "queue_timeout_s": _left(queue_limit_s, gone_s),
        }


def _left(limit_s: float, gone_s: float) -> float:
    return max(limit_s - gone_s, MIN_LEFT_S) if limit_s else 0.0


def _error_of(report: Report) -> ErrorInfo | None:
    return report.error if isinstance(report, Refused | Output) else None
