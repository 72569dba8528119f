"""The engine client of a disaggregated server: prefill engines (P) and decode engines (D).

Callers see one engine. The decode engines are an `EngineFleet`: it has the open requests, chooses a
D for each, and moves requests from a D that refuses them or is lost to another one. This module
adds the handover of prompts from another fleet, the prefill engines; the states of one handover are
in `handoff.py`. The rules:

- P computes a prompt once for all its choices, if they are sent in one turn of the event loop;
- a prompt goes to the P that probably has its prefix in its cache; if that P refuses the prompt or
  is lost, another one computes it;
- P's lease of the K/V is renewed until D has sent its first token; then the K/V is released;
- if no P can compute the prompt, D computes it, or the request fails: the operator chooses which
  (`recomputes`); if no P is ready to begin with, D computes it in any case;
- a request whose D is lost continues on another D: from P's K/V if it is still there, otherwise
  that D computes the prompt and the answer so far;
- only engines with the same model as most decode engines are used.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

from gevent import get_hub
from msgspec.structs import replace

from gateway.engine.base import Report, RoutedEncodeOptions, RoutedOptions, Subscriber
from gateway.engine.client import ConnectedEngine, ZmqEngineClient
from gateway.fleet.engine_fleet import MAX_LOSSES, EngineFleet, FleetOptions
from gateway.fleet.engine_list import EngineList
from gateway.fleet.failover import FailoverState
from gateway.fleet.handoff import (
    Handoff,
    HandoffAction,
    HandoffEvent,
    HandoffState,
    merge_usage,
    was_recomputed,
)
from gateway.fleet.paired_numerics import PairedNumerics
from gateway.fleet.remote_prefill import PrefillFleet, RemotePrefill
from gateway.fleet.replica_set import ReplicaSet
from gateway.fleet.replicated_request import ReplicatedRequest
from protocol.engine.encoding import EncodeInputs
from protocol.engine.messages import Aborted, Accepted, Output, Refused
from protocol.engine.model_card import ModelCard
from protocol.engine.sampling import SamplingParams
from protocol.wire.arrays import Int32
from protocol.wire.errors import (
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

LIMIT_CODES = (LimitReached.code, QueueTimeout.code, TimedOut.code)
"""Codes of errors that enforce a limit. D must not compute a prompt that P refused with these."""
MIN_PROMPT = 2
"""Minimum length of a prompt that P computes. D always computes the last prompt token itself."""


@dataclass(slots=True, eq=False)
class SplitRequest(ReplicatedRequest):
    """A caller's open request. Its `subscriber` is this module's; `caller` is that of the caller.

    While P computes the prompt, the request is open but was sent to no D.
    """

    caller: Subscriber = field(default=lambda report: None)
    handoff: Handoff = field(default_factory=lambda: Handoff(HandoffState.DECODING))
    #: The computation of the prompt at P; None: D computes the prompt.
    prefill: RemotePrefill | None = None


class DisaggregatedClient(EngineFleet[SplitRequest]):
    """The `EngineClient` that sends prompts to prefill engines (P) and decodes on decode engines
    (D).

    prefill, decode  addresses of the engines
    new_client       returns a client for an address
    min_tokens       shortest prompt that P computes
    recomputes       D computes the prompt if P fails, if its handle cannot be used, or if the D
                     that had the K/V is lost; otherwise the request fails. It always fails if P
                     enforced a limit (LIMIT_CODES)
    on_handover      called for each request that D continued from P's K/V
    on_fallback      called with the cause for each request (one choice) whose prompt D computes
                     instead of P; prompts that P never computes, such as short ones, do not count
    """

    def __init__(
        self,
        prefill: EngineList,
        decode: EngineList,
        new_client: Callable[[str], ZmqEngineClient],
        options: FleetOptions,
        *,
        min_tokens: int,
        recomputes: bool,
        on_handover: Callable[[], None],
        on_fallback: Callable[[str], None],
    ) -> None:
        numerics = PairedNumerics("engines that share K/V")
        decode_engines = ReplicaSet(decode, new_client, "decode", numerics)
        super().__init__(decode_engines, SplitRequest, options)
        self._p = PrefillFleet(ReplicaSet(prefill, new_client, "prefill", numerics), options)
        self._min_tokens = min_tokens
        self._recomputes = recomputes
        self._on_handover, self._on_fallback = on_handover, on_fallback
        self._prefills: set[RemotePrefill] = set()
        self._unsent: list[RemotePrefill] = []
        self._has_warned = False  # that no prefill engine is ready

    # ---- lifecycle and state

    def start(self) -> None:
        super().start()
        self._p.start()

    def close(self) -> None:
        super().close()
        self._p.close()

    def on_exited(self) -> None:
        self._p.on_exited()
        super().on_exited()

    def _tick(self) -> None:
        super()._tick()
        now = time.monotonic()
        for prefill in self._prefills:
            prefill.renew_lease(now)

    @property
    def connections(self) -> list[ConnectedEngine]:
        return [*self._p.connections, *super().connections]

    @property
    def model(self) -> ModelCard | None:
        """Return the card of a usable D, without `numerics` if the engines differ in it."""
        self._p.refresh()
        return super().model

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
        session = options.get("session", "")
        request = self._new_request(prompt, params, subscriber, options)
        request.caller, request.subscriber = subscriber, partial(self._on_decoded, request)
        if not self._can_prefill(request):
            self._open(request)
            return request.number
        if (trouble := self.trouble()) is not None:  # now rather than after P's computation
            raise trouble
        request.prefill = self._prefill(request, session)
        if request.prefill is None:
            self._open(request)
        else:
            request.handoff = Handoff(HandoffState.COMPUTING)
            request.prefill.readers.add(request.number)
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

    def abort_by_label(self, labels: Sequence[str]) -> Aborted:
        """Abort requests by label; see `EngineClient.abort_by_label`.

        The prefill engines are called first. If P hands a request over in the meantime, the request
        is open at D when D is called, so it is aborted there.
        """
        at_p: set[str] = set()
        with contextlib.suppress(ServingError):  # lost engines have no open requests
            at_p.update(self._p.abort_by_label(labels).aborted)
        at_d = super().abort_by_label(labels)
        return Aborted(
            request=0,
            aborted=[label for label in labels if label in at_p or label in at_d.aborted],
            unknown=[label for label in at_d.unknown if label not in at_p],
        )

    def _on_abort(self, request: SplitRequest) -> None:
        self._on_handoff(request, HandoffEvent.ABORT)

    # ---- the prefill

    def _can_prefill(self, request: SplitRequest) -> bool:
        """Return whether P may compute this prompt. D itself computes short prompts, prompts whose
        logprobs are requested, and the prompts of requests without output (`max_tokens` 0). If the
        model has a recurrent state, P hands over whole blocks only."""
        params, limits = request.params, self.limits
        least = limits.block_tokens + 1 if limits is not None and limits.state_bytes else MIN_PROMPT
        return (
            len(request.prompt) >= max(self._min_tokens, least)
            and params.prompt_logprobs is None
            and params.max_tokens != 0
        )

    def _prefill(self, request: SplitRequest, session: str) -> RemotePrefill | None:
        """Return the prefill that all choices of the prompt share; None if no P is ready."""
        options: RoutedOptions = {**request.options, "session": session}
        for unsent in self._unsent:
            if unsent.is_for(request.prompt, options):
                return unsent
        if (trouble := self._p.trouble_for(request.digest)) is not None:
            self._on_fallback("no_prefill")
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "no prefill engine is ready, so decode engines compute prompts (%s)", trouble
                )
            return None
        self._has_warned = False
        if not self._unsent:
            get_hub().loop.run_callback(self._send_prefills)  # at the end of this turn
        prefill = RemotePrefill(
            self._p, request.prompt, request.digest, options, self._on_prefill_end
        )
        self._unsent.append(prefill)
        self._prefills.add(prefill)
        return prefill

    def _send_prefills(self) -> None:
        """Send the prefills of this turn of the event loop. This is called at the end of the turn,
        when all choices have been added as readers."""
        unsent, self._unsent = self._unsent, []
        for prefill in unsent:
            prefill.send()
            if not prefill.readers:
                self._prefills.discard(prefill)

    def _on_prefill_end(self, prefill: RemotePrefill, report: Report) -> None:
        """Handle the last report on a prompt, for each choice that needs the K/V."""
        event, cause = HandoffEvent.COMPUTED, ""
        if not prefill.handle:
            event, cause = self._failure_event(prefill, report)
        for number in sorted(prefill.readers):
            request = self._requests.get(number)
            if request is None:  # it was aborted because another choice has just failed
                continue
            if cause:
                self._on_fallback(cause)
            request.num_lost_before = prefill.num_losses
            self._on_handoff(request, event, report)

    def _failure_event(self, prefill: RemotePrefill, report: Report) -> tuple[HandoffEvent, str]:
        """Return the event for a last report without a handle, and the cause of a fallback. The
        cause is "" if D does not compute the prompt instead."""
        error = _error_of(report)
        if error is None or not self._recomputes:  # aborted by label, or the policy is to fail
            return HandoffEvent.STOPPED, ""
        if error.code in LIMIT_CODES or prefill.num_losses >= MAX_LOSSES:
            return HandoffEvent.STOPPED, ""
        if error.code == EngineLost.code:
            return HandoffEvent.MISSED, "lost"
        return HandoffEvent.MISSED, "refused" if isinstance(report, Refused) else "failed"

    # ---- reports of D

    def _on_decoded(self, request: SplitRequest, report: Report) -> None:
        """Handle what the decode engines report of a request, wherever it was moved."""
        if not isinstance(report, Output):
            is_reply = isinstance(report, Accepted)
            event = HandoffEvent.ACCEPTED if is_reply else HandoffEvent.FINISHED
            self._on_handoff(request, event, report)
            return
        merged = self._with_merged_usage(request, report)
        if report.finish is not None:
            self._on_handoff(request, HandoffEvent.FINISHED, merged)
        elif request.handoff.state is HandoffState.DECODING:  # the usual case, without the table
            request.caller(merged)
        else:
            self._on_handoff(request, HandoffEvent.TOKENS, merged)

    def _with_merged_usage(self, request: SplitRequest, output: Output) -> Output:
        """Return `output` with the usage of P and D together. D's first usage also shows whether D
        used P's K/V. So this method also counts the request as a handover or a fallback."""
        prefill, usage = request.prefill, output.usage
        if prefill is None or usage is None:
            return output
        if request.handoff.state is HandoffState.ACCEPTED and request.replica is not None:
            limits = request.replica.client.limits
            if limits is not None and was_recomputed(usage, limits.block_tokens):
                self._on_fallback("fetch")
            else:
                self._on_handover()
        return replace(output, usage=merge_usage(usage, prefill.usage))

    def _on_refused(self, request: SplitRequest, refused: Refused) -> None:
        """Handle a refusal of D. If D cannot use the handle, it computes the prompt."""
        is_about_handle = request.is_prefilled and refused.error.param == KV_FIELD
        if not (is_about_handle and self._recomputes):
            super()._on_refused(request, refused)
            return
        log.warning("a decode engine refused a handle: %s", refused.error.message)
        self._on_fallback("handle")
        self._on_handoff(request, HandoffEvent.UNUSABLE)

    def _on_loss(self, request: SplitRequest, output: Output) -> None:
        """Handle the loss of D. K/V of a request that has sent tokens was lost with it."""
        if request.is_prefilled and request.handoff.state is HandoffState.DECODING:
            request.options["kv_handle"] = ""
            if not self._recomputes and not request.is_stopped:
                self._give_up(request, "no other engine may compute its prompt (kv_on_failure)")
                return
        super()._on_loss(request, output)

    # ---- actions

    def _on_handoff(
        self, request: SplitRequest, event: HandoffEvent, report: Report | None = None
    ) -> None:
        """Change the state of the handover and perform the actions that follow."""
        actions = request.handoff.on(event)
        if request.handoff.state is HandoffState.ENDED:
            self._requests.pop(request.number, None)
        for action in actions:
            self._perform(action, request, report)

    def _perform(self, action: HandoffAction, request: SplitRequest, report: Report | None) -> None:
        prefill = request.prefill
        match action:
            case HandoffAction.CONTINUE if prefill is not None:
                request.options["kv_handle"] = prefill.handle
                self._send_to_d(request)
            case HandoffAction.COMPUTE_ALL:
                request.prefill = None
                request.options["kv_handle"] = ""
                self._send_to_d(request)
            case HandoffAction.EMIT if report is not None:
                request.caller(report)
            case HandoffAction.RELEASE if prefill is not None:
                prefill.remove_reader(request.number, request.abort_reason)
                if not prefill.readers:
                    self._prefills.discard(prefill)
            case HandoffAction.ABORT:
                super()._on_abort(request)

    def _send_to_d(self, request: SplitRequest) -> None:
        """Send the request to a D. If that is not possible, end it with the error, or let it wait
        if a D that was lost had accepted it."""
        if request.failover.state is FailoverState.MOVED:
            if not self._place(request):
                self._on_unplaced(request)
            return
        request.is_late, request.sent_at = True, time.monotonic()
        try:
            self._open(request)
        except ServingError as error:
            end = Output(request=request.number, finish="error", error=error.info())
            self._on_handoff(request, HandoffEvent.FINISHED, end)


def _error_of(report: Report) -> ErrorInfo | None:
    return report.error if isinstance(report, Refused | Output) else None
