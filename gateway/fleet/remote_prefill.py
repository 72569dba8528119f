"""One prompt that a prefill engine P computes for several choices, and the lease of its K/V.

The choices are the readers of the K/V. The prompt's request is open at P from `send` until P's last
report. After that P keeps the K/V under a lease, which `renew_lease` renews. A choice that no
longer needs the K/V is removed from the readers. When no reader is left, the computation is stopped
if it is running, and the K/V is released if P keeps it. If P's handle arrives after that, the K/V
is released at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.engine.base import Report, RoutedOptions, Subscriber
from gateway.engine.client import ZmqEngineClient
from gateway.fleet.engine_fleet import EngineFleet, FleetOptions
from gateway.fleet.replica_set import ReplicaSet
from gateway.fleet.replicated_request import ReplicatedRequest
from protocol.engine.messages import Accepted, Output, Refused, Usage
from protocol.engine.sampling import SamplingParams
from protocol.engine.timeline import AbortReason
from protocol.wire.arrays import Int32
from protocol.wire.errors import EngineError, EngineNotReady, ServingError

RENEWALS_PER_LEASE = 3
"""Renewals per duration of a lease. With 3, two renewals in a row may fail."""
NO_HANDLE = "the prefill engine returned no K/V handle: check its role and its cluster key"


class PrefillFleet(EngineFleet[ReplicatedRequest]):
    """The prefill engines of a server. A prompt whose engine is lost waits for no other one,
    because decode engines can compute it."""

    def __init__(self, engines: ReplicaSet, options: FleetOptions) -> None:
        super().__init__(engines, ReplicatedRequest, replace(options, failover_s=0.0))

    def refresh(self) -> None:
        """Read the states of the engines."""
        self._replicas.refresh()

    def trouble_for(self, digest: str) -> ServingError | None:
        """Return why no request for this model can be sent now; None if one can."""
        self.refresh()
        if len(self._replicas.usable) > len(self._replicas.unfit_to_continue(digest)):
            return None
        return self.trouble() or EngineNotReady("the prefill engines have another model")

    def open(
        self, prompt: Int32, digest: str, on_report: Subscriber, options: RoutedOptions
    ) -> ReplicatedRequest:
        """Send the prompt to an engine with the model `digest`. Raises as `generate` does."""
        request = self._new_request(prompt, SamplingParams(), on_report, options)
        request.digest = digest
        self._open(request)
        return request

    def stop(self, request: ReplicatedRequest, reason: AbortReason) -> None:
        """Abort an open request. Its subscriber still gets the last output."""
        request.is_stopped = True
        if request.replica is not None:
            request.replica.client.stop(request.inner, reason)


class RemotePrefill:
    """One prompt that a prefill engine computes, and the choices that read its K/V.

    fleet    the prefill engines
    digest   digest of the model
    options  the options of a choice's request. The grammar is not sent to P: only D uses it
    on_end   called with the last report, unless all readers were removed before it
    """

    def __init__(
        self,
        fleet: PrefillFleet,
        prompt: Int32,
        digest: str,
        options: RoutedOptions,
        on_end: Callable[[RemotePrefill, Report], None],
    ) -> None:
        self.prompt = prompt
        self._fleet, self._digest = fleet, digest
        self._shared = _shared(options)
        self._is_first = options.get("is_first", True)
        #: Numbers of the choices' requests that need the K/V.
        self.readers: set[int] = set()
        #: Identifies the K/V for D. "" before P's last report, and if P failed.
        self.handle = ""
        #: P's usage; None before P's last report.
        self.usage: Usage | None = None
        #: The request to the prefill engines; None if it was not sent.
        self._request: ReplicatedRequest | None = None
        #: Whether P has the request and has not sent its last report.
        self._is_open = False
        #: The engine that keeps the K/V of `handle`.
        self._p: ZmqEngineClient | None = None
        self._on_end = on_end
        self._renewed_at = 0.0

    @property
    def num_losses(self) -> int:
        """How many prefill engines were lost while they computed the prompt."""
        return 0 if self._request is None else self._request.num_losses

    def is_for(self, prompt: Int32, options: RoutedOptions) -> bool:
        """Return whether this prefill can serve a request with `prompt` and `options`.

        It can if the request is another choice of the same prompt. Such choices have the identical
        `prompt` object and equal options, except for the grammar and `is_first`.
        """
        return self.prompt is prompt and self._shared == _shared(options)

    def send(self) -> None:
        """Send the request to P, unless there are no readers. All readers must have been added."""
        if not self.readers:
            return
        self._is_open = True
        options: RoutedOptions = {
            **self._shared,
            "kv_readers": len(self.readers),
            "is_first": self._is_first,
        }
        try:
            self._request = self._fleet.open(self.prompt, self._digest, self._on_report, options)
        except ServingError as error:
            self._on_report(Refused(request=0, error=error.info()))

    def remove_reader(self, reader: int, reason: AbortReason) -> None:
        """Remove a choice that needs the prompt's K/V. After the last one, release the K/V or stop
        the prefill; the prefill engine's timeline then shows `reason`."""
        self.readers.discard(reader)
        if self.readers:
            return
        if self._p is not None:
            self._p.release_kv([self.handle])
        elif self._is_open and self._request is not None:
            self._fleet.stop(self._request, reason)

    def renew_lease(self, now: float) -> None:
        """Renew the lease, if P has started one and the last renewal was at least
        1 / RENEWALS_PER_LEASE of its duration ago. Call this several times a second."""
        if self._p is None or (limits := self._p.limits) is None:
            return
        if now - self._renewed_at >= limits.kv_lease_s / RENEWALS_PER_LEASE:
            self._renewed_at = now
            self._p.keep_kv([self.handle])

    def _on_report(self, report: Report) -> None:
        """Handle a report of the prefill engines. Only the last one matters: they send no
        tokens."""
        if isinstance(report, Accepted) or (isinstance(report, Output) and not report.finish):
            return
        self._is_open = False
        if isinstance(report, Output):
            self.handle, self.usage = report.kv_handle, report.usage
            if self.handle and self._request is not None and self._request.replica is not None:
                self._p = self._request.replica.client
            if not self.handle and report.error is None and report.finish != "abort":
                error = EngineError(NO_HANDLE).info()
                report = Output(request=report.request, finish="error", error=error)
        if self.readers:
            self._on_end(self, report)
        elif self._p is not None:
            self._p.release_kv([self.handle])


def _shared(options: RoutedOptions) -> RoutedOptions:
    """Return the options that are equal for all choices of a prompt. They are sent to P."""
    shared = options.copy()
    shared.pop("grammar", None)
    shared.pop("is_first", None)
    return shared
