"""The engine client of a disaggregated server: prefill engines (P) and decode engines (D).

Callers see one engine. This module chooses the engines and sends the requests; the states of a
request are in `handoff.py`. The rules:

- P computes a prompt once for all its choices, if they are sent in one turn of the event loop;
- P's lease of the K/V is renewed until D has sent its first token; then the K/V is released;
- if P refuses, fails or is lost, D computes the whole prompt, or the request fails: the operator
  chooses which (`recomputes`);
- if no P is ready, D computes the whole prompt in any case;
- if no D is ready, requests fail;
- only engines with the same model as the first ready D are used.
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

from gateway.engine.base import (
    Report,
    RoutedEncodeOptions,
    RoutedOptions,
    Subscriber,
    remaining_s,
)
from gateway.engine.client import ConnectedEngine, ZmqEngineClient
from gateway.fleet.adapters import load_in_all, unload_in_all
from gateway.fleet.handoff import (
    Handoff,
    HandoffAction,
    HandoffEvent,
    HandoffState,
    merge_usage,
    was_recomputed,
)
from gateway.fleet.paired_numerics import PairedNumerics
from gateway.fleet.pool import EnginePool
from gateway.fleet.remote_prefill import RemotePrefill
from protocol.engine.adapters import AdapterInfo
from protocol.engine.encoding import EncodeInputs
from protocol.engine.messages import Aborted, Accepted, Account, Limits, Output, Refused
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import GenerateOptions
from protocol.engine.stats import EngineStats
from protocol.engine.timeline import AbortReason
from protocol.wire.arrays import Int32
from protocol.wire.errors import (
    EngineError,
    EngineLost,
    ErrorInfo,
    InvalidRequest,
    LimitReached,
    QueueTimeout,
    ServingError,
    TimedOut,
)
from protocol.worker.kv import KV_FIELD

log = logging.getLogger(__name__)

RENEW_EVERY_S = 0.25
"""Interval at which leases are checked and renewed. A lease lasts at least a second."""
LIMIT_CODES = (LimitReached.code, QueueTimeout.code, TimedOut.code)
"""Codes of errors that enforce a limit. D must not compute a prompt that P refused with these."""
MIN_PROMPT = 2
"""Minimum length of a prompt that P computes. D always computes the last prompt token itself."""


@dataclass(slots=True, eq=False)
class _Request:
    """A caller's open request, with the requests that were sent to P and D for it."""

    #: The number that `generate` returned to the caller.
    number: int
    prompt: Int32
    params: SamplingParams
    subscriber: Subscriber
    options: GenerateOptions
    handoff: Handoff
    #: The computation of the prompt at P; None: D computes the prompt.
    prefill: RemotePrefill | None = None
    #: The decode engine; None before the request was sent to D.
    d: ZmqEngineClient | None = None
    #: The request's number at D.
    d_request: int = 0
    #: The arguments of `abort`. `on_freed` is called after D has released the request's resources.
    abort_reason: AbortReason = ""
    on_freed: Callable[[], None] | None = None
    arrived_at: float = field(default_factory=time.monotonic)


class DisaggregatedClient:
    """The `EngineClient` that sends prompts to prefill engines (P) and decodes on decode engines
    (D).

    prefill, decode  clients of the engines
    min_tokens       shortest prompt that P computes
    recomputes       D computes the prompt if P fails or its handle cannot be used; otherwise the
                     request fails. It always fails if P enforced a limit (LIMIT_CODES)
    on_handover      called for each request that D continued from P's K/V
    on_fallback      called with the cause for each request (one choice) whose prompt D computes
                     instead of P; prompts that P never computes, such as short ones, do not count
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
        self.connections = [
            *(ConnectedEngine("prefill", engine) for engine in prefill),
            *(ConnectedEngine("decode", engine) for engine in decode),
        ]
        self._p, self._d = EnginePool("prefill", prefill), EnginePool("decode", decode)
        self._min_tokens = max(min_tokens, MIN_PROMPT)
        self._recomputes = recomputes
        self._on_handover, self._on_fallback = on_handover, on_fallback
        self._requests: dict[int, _Request] = {}
        self._prefills: set[RemotePrefill] = set()
        self._unsent: list[RemotePrefill] = []
        self._next_number = 1
        self._has_warned = False  # that no prefill engine is ready
        self._numerics = PairedNumerics()
        self._compared: dict[str, ModelCard] = {}  # address -> the card that was compared last
        self._clock: Any = None

    # ---- lifecycle

    def start(self) -> None:
        if self._clock is None:
            for connection in self.connections:
                connection.client.start()
            self._clock = get_hub().loop.timer(RENEW_EVERY_S, repeat=RENEW_EVERY_S)
            self._clock.start(self._renew_leases)

    def close(self) -> None:
        if self._clock is not None:
            self._clock.stop()
            self._clock.close()
            self._clock = None
        for number in list(self._requests):
            self.abort(number, "client_lost")
        for connection in self.connections:
            connection.client.close()

    # ---- state: that of the first ready decode engine

    @property
    def is_ready(self) -> bool:
        return self._d.is_ready

    def trouble(self) -> ServingError | None:
        return None if self.is_ready else self._d.first.trouble()

    @property
    def model(self) -> ModelCard | None:
        """Return the card of the first ready D, without `numerics` if the engines differ in it."""
        card = self._d.first.model
        self._compare_numerics()
        return None if card is None else self._numerics.promised(card)

    @property
    def limits(self) -> Limits | None:
        return self._d.first.limits

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        return self._d.first.adapters

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        self.start()
        return load_in_all(self._ready_engines, name, path)

    def unload_adapter(self, name: str) -> AdapterInfo:
        self.start()
        return unload_in_all(self._ready_engines, name)

    @property
    def _ready_engines(self) -> list[ZmqEngineClient]:
        return [each.client for each in self.connections if each.client.session.is_ready]

    @property
    def epoch(self) -> str | None:
        return self._d.first.epoch

    @property
    def silence_s(self) -> float | None:
        return self._d.first.silence_s

    @property
    def stats(self) -> EngineStats | None:
        return self._d.first.stats

    def cached_refusal(self, account: Account | None) -> None:
        """Return None: each engine has its own queue, so the next one may accept the request."""

    def cache_refusal(self, account: Account | None, refusal: ServingError) -> None:
        """Do nothing; see `cached_refusal`."""

    # ---- requests

    def generate(
        self,
        prompt: Sequence[int] | Int32,
        params: SamplingParams,
        subscriber: Subscriber,
        **options: Unpack[RoutedOptions],
    ) -> int:
        """Send a request to P or D and return its number; see `RequestSender.generate`. Raises
        InvalidRequest if `options` contain K/V options, because this class sets them."""
        if options.pop("kv_readers", 0) or options.pop("kv_handle", ""):
            message = f"{KV_FIELD}: not supported, this server manages K/V transfer itself"
            raise InvalidRequest(message, param=KV_FIELD)
        options.pop("session", "")
        self.start()
        self._choose_d()  # raises now rather than after P has computed the prompt
        ids = prompt if isinstance(prompt, Int32) else Int32.of(prompt)
        prefill = self._prefill(ids, options) if self._can_prefill(ids, params) else None
        handoff = Handoff(HandoffState.DECODING if prefill is None else HandoffState.COMPUTING)
        request = _Request(self._next_number, ids, params, subscriber, options, handoff, prefill)
        self._next_number += 1
        if prefill is None:
            self._send_to_d(request)
        else:
            prefill.readers.add(request.number)
        self._requests[request.number] = request
        return request.number

    def encode(
        self,
        inputs: EncodeInputs,
        subscriber: Subscriber,
        **options: Unpack[RoutedEncodeOptions],
    ) -> int:
        """Raise InvalidRequest: these engines share the work of generating, and encode nothing."""
        raise InvalidRequest(
            "model: a server with prefill and decode engines has no embeddings and no scores",
            param="model",
        )

    def abort(
        self,
        request: int,
        reason: AbortReason,
        *,
        on_freed: Callable[[], None] | None = None,
    ) -> None:
        found = self._requests.get(request)
        if found is not None:
            found.abort_reason, found.on_freed = reason, on_freed
            self._on_event(found, HandoffEvent.ABORT)

    def abort_by_label(self, labels: Sequence[str]) -> Aborted:
        """Abort requests by label; see `EngineClient.abort_by_label`.

        The prefill engines are called first. If P hands a request over in the meantime, the request
        is open at D when D is called, so it is aborted there.
        """
        self.start()
        aborted: set[str] = set()
        for engine in self._p.engines:
            with contextlib.suppress(EngineError):  # a lost engine has no open requests
                aborted.update(engine.abort_by_label(labels).aborted)
        self._choose_d()
        for engine in self._d.engines:
            if engine.is_ready:
                aborted.update(engine.abort_by_label(labels).aborted)
        return Aborted(
            request=0,
            aborted=[label for label in labels if label in aborted],
            unknown=[label for label in labels if label not in aborted],
        )

    # ---- choosing engines

    def _compare_numerics(self) -> None:
        """Compare the engines whose cards have arrived since the last call."""
        for connection in self.connections:
            engine, card = connection.client, connection.client.model
            if card is not None and card is not self._compared.get(engine.address):
                self._compared[engine.address] = card
                self._numerics.add(f"the {connection.role} engine {engine.address}", card)

    def _can_prefill(self, prompt: Int32, params: SamplingParams) -> bool:
        """Return whether P may compute this prompt. D itself computes short prompts, prompts whose
        logprobs are requested, and the prompts of requests without output (`max_tokens` 0)."""
        return (
            len(prompt) >= self._min_tokens
            and params.prompt_logprobs is None
            and params.max_tokens != 0
        )

    def _prefill(self, prompt: Int32, options: GenerateOptions) -> RemotePrefill | None:
        """Return the prefill that all choices of `prompt` share; None if no P is ready."""
        for unsent in self._unsent:
            if unsent.is_for(prompt, options):
                return unsent
        try:
            engine = self._p.choose(self.model, self._waiting_tokens)
        except EngineError as error:
            self._on_fallback("no_prefill")
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "no prefill engine is ready, so decode engines compute prompts (%s)", error
                )
            return None
        self._has_warned = False
        if not self._unsent:
            get_hub().loop.run_callback(self._send_prefills)  # at the end of this turn
        prefill = RemotePrefill(engine, prompt, options, self._on_prefill_end)
        self._unsent.append(prefill)
        self._prefills.add(prefill)
        return prefill

    def _choose_d(self) -> ZmqEngineClient:
        """Return the least busy decode engine (D). Raises the errors of `EnginePool.choose`."""
        return self._d.choose(self.model, self._load)

    def _waiting_tokens(self, p: ZmqEngineClient) -> int:
        """Return the load of P in tokens.

        It is the sum of the waiting tokens in P's last heartbeat and of the prompts that this
        process has sent to P, because the heartbeat may not include these yet.
        """
        ours = (len(prefill.prompt) for prefill in self._prefills if prefill.p is p)
        return sum(ours) + (p.stats.waiting_tokens if p.stats else 0)

    def _load(self, d: ZmqEngineClient) -> int:
        """Return the load of D in requests, computed as in `_waiting_tokens`."""
        ours = sum(request.d is d for request in self._requests.values())
        return ours + (d.stats.running + d.stats.waiting if d.stats else 0)

    # ---- events

    def _send_prefills(self) -> None:
        """Send the prefills of this turn of the event loop. This is called at the end of the turn,
        when all choices have been added as readers."""
        unsent, self._unsent = self._unsent, []
        for prefill in unsent:
            prefill.send()
            if not prefill.readers:
                self._prefills.discard(prefill)

    def _renew_leases(self) -> None:
        now = time.monotonic()
        for prefill in self._prefills:
            prefill.renew_lease(now)

    def _on_prefill_end(self, prefill: RemotePrefill, report: Report) -> None:
        """Handle P's last report, for each choice that needs the K/V."""
        event, cause = HandoffEvent.COMPUTED, ""
        if not prefill.handle:
            event, cause = self._failure_event(report)
        for number in sorted(prefill.readers):
            if cause:
                self._on_fallback(cause)
            self._on_event(self._requests[number], event, report)

    def _failure_event(self, report: Report) -> tuple[HandoffEvent, str]:
        """Return the event for a report of P that has no handle, and the cause of a fallback. The
        cause is "" if D does not compute the prompt instead."""
        error = _error_of(report)
        if error is None or not self._recomputes:  # aborted by label, or the policy is to fail
            return HandoffEvent.STOPPED, ""
        if error.code in LIMIT_CODES:
            return HandoffEvent.STOPPED, ""
        if error.code == EngineLost.code:
            return HandoffEvent.MISSED, "lost"
        return HandoffEvent.MISSED, "refused" if isinstance(report, Refused) else "failed"

    def _on_report(self, request: _Request, report: Report) -> None:
        """Apply a report of the decode engine (D) to the request."""
        match report:
            case Accepted():
                self._on_event(request, HandoffEvent.ACCEPTED, report)
            case Refused(error=error) if self._recomputes and _is_about_handle(request, error):
                log.warning("a decode engine refused a handle: %s", error.message)
                self._on_fallback("handle")
                self._on_event(request, HandoffEvent.UNUSABLE, report)
            case Output():
                merged = self._with_merged_usage(request, report)
                event = HandoffEvent.TOKENS if report.finish is None else HandoffEvent.FINISHED
                self._on_event(request, event, merged)
            case _:
                self._on_event(request, HandoffEvent.FINISHED, report)

    def _with_merged_usage(self, request: _Request, output: Output) -> Output:
        """Return `output` with the usage of P and D together. D's first usage also shows whether D
        used P's K/V. So this method also counts the request as a handover or a fallback."""
        prefill, usage = request.prefill, output.usage
        if prefill is None or usage is None:
            return output
        if request.handoff.state is HandoffState.ACCEPTED and request.d is not None:
            limits = request.d.limits
            if limits is not None and was_recomputed(usage, limits.block_tokens):
                self._on_fallback("fetch")
            else:
                self._on_handover()
        return msgspec.structs.replace(output, usage=merge_usage(usage, prefill.usage))

    # ---- actions

    def _on_event(
        self, request: _Request, event: HandoffEvent, report: Report | None = None
    ) -> None:
        """Change the request's state and perform the actions that follow."""
        actions = request.handoff.on(event)
        if request.handoff.state is HandoffState.ENDED:
            self._requests.pop(request.number, None)
        for action in actions:
            self._perform(action, request, report)

    def _perform(self, action: HandoffAction, request: _Request, report: Report | None) -> None:
        prefill = request.prefill
        match action:
            case HandoffAction.CONTINUE if prefill is not None:
                self._send_or_fail(request, prefill.handle)
            case HandoffAction.COMPUTE_ALL:
                request.prefill = None
                self._send_or_fail(request, "")
            case HandoffAction.EMIT if report is not None:
                request.subscriber(report)
            case HandoffAction.RELEASE if prefill is not None:
                prefill.remove_reader(request.number, request.abort_reason)
                if not prefill.readers:
                    self._prefills.discard(prefill)
            case HandoffAction.ABORT if request.d is not None:
                request.d.abort(request.d_request, request.abort_reason, on_freed=request.on_freed)

    def _send_or_fail(self, request: _Request, handle: str) -> None:
        """Send the request to D. If that is not possible, end it with the error."""
        try:
            self._send_to_d(request, handle)
        except EngineError as error:
            end = Output(request=request.number, finish="error", error=error.info())
            self._on_event(request, HandoffEvent.FINISHED, end)

    def _send_to_d(self, request: _Request, handle: str = "") -> None:
        """Send the request to the least busy D. `handle` is "" if D must compute the prompt."""
        d = self._choose_d()
        options: GenerateOptions = {
            **request.options,
            **self._time_left(request, has_started=bool(handle)),
        }
        options["kv_handle"] = handle
        on_report = partial(self._on_report, request)
        request.d_request = d.generate(request.prompt, request.params, on_report, **options)
        request.d = d

    def _time_left(self, request: _Request, *, has_started: bool) -> GenerateOptions:
        """Return the timeouts for D: those of the request less the time since its arrival. If P has
        computed the prompt, the request has started. It then has no queue timeout."""
        elapsed_s = time.monotonic() - request.arrived_at
        timeout_s = request.options.get("timeout_s", 0.0)
        queue_timeout_s = 0.0 if has_started else request.options.get("queue_timeout_s", 0.0)
        return {
            "timeout_s": remaining_s(timeout_s, elapsed_s),
            "queue_timeout_s": remaining_s(queue_timeout_s, elapsed_s),
        }


def _is_about_handle(request: _Request, error: ErrorInfo) -> bool:
    """Return whether D refused the request because it cannot use the handle."""
    return request.handoff.state is HandoffState.REQUESTED and error.param == KV_FIELD


def _error_of(report: Report) -> ErrorInfo | None:
    return report.error if isinstance(report, Refused | Output) else None
