"""One prompt that a prefill engine P computes for several choices, and the lease of its K/V.

The choices are the readers of the K/V. The prompt's request is open at P from `send` until P's last
report. After that P keeps the K/V under a lease, which `renew_lease` renews. A choice that no
longer needs the K/V is removed from the readers. When no reader is left, the computation is stopped
if it is running, and the K/V is released if P keeps it. If P's handle arrives after that, the K/V
is released at once.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.engine.base import Report
from gateway.engine.client import ZmqEngineClient
from protocol.engine.messages import Accepted, Output, Usage
from protocol.engine.sampling import SamplingParams
from protocol.engine.session import GenerateOptions
from protocol.engine.timeline import AbortReason
from protocol.wire.arrays import Int32
from protocol.wire.errors import EngineError

RENEWALS_PER_LEASE = 3
"""Renewals per duration of a lease. With 3, two renewals in a row may fail."""
NO_HANDLE = "the prefill engine returned no K/V handle: check its role and its cluster key"


class RemotePrefill:
    """One prompt that a prefill engine computes, and the choices that read its K/V.

    p        the prefill engine
    options  the options of a choice's request. The grammar is not sent to P: only D uses it
    on_end   called with P's last report, unless all readers were removed before it
    """

    def __init__(
        self,
        p: ZmqEngineClient,
        prompt: Int32,
        options: GenerateOptions,
        on_end: Callable[[RemotePrefill, Report], None],
    ) -> None:
        self.p = p
        self.prompt = prompt
        self._shared = _shared(options)
        self._is_first = options.get("is_first", True)
        #: Numbers of the choices' requests that need the K/V.
        self.readers: set[int] = set()
        #: Identifies the K/V for D. "" before P's last report, and if P failed.
        self.handle = ""
        #: P's usage; None before P's last report.
        self.usage: Usage | None = None
        #: Whether P has the request and has not sent its last report.
        self.is_open = False
        self._on_end = on_end
        self._request = 0
        self._renewed_at = 0.0

    def is_for(self, prompt: Int32, options: GenerateOptions) -> bool:
        """Return whether this prefill can serve a request with `prompt` and `options`.

        It can if the request is another choice of the same prompt. Such choices have the identical
        `prompt` object and equal options, except for the grammar and `is_first`.
        """
        return self.prompt is prompt and self._shared == _shared(options)

    def send(self) -> None:
        """Send the request to P, unless there are no readers. All readers must have been added."""
        if not self.readers:
            return
        self.is_open = True
        try:
            options: GenerateOptions = {
                **self._shared,
                "kv_readers": len(self.readers),
                "is_first": self._is_first,
            }
            params = SamplingParams()
            self._request = self.p.generate(self.prompt, params, self._on_report, **options)
        except EngineError as error:
            self._on_report(Output(request=0, finish="error", error=error.info()))

    def remove_reader(self, reader: int, reason: AbortReason) -> None:
        """Remove a choice that needs the prompt's K/V. After the last one, release the K/V or stop
        the prefill; the prefill engine's timeline then shows `reason`."""
        self.readers.discard(reader)
        if self.readers:
            return
        if self.handle:
            self.p.release_kv([self.handle])
        elif self.is_open:
            self.p.stop(self._request, reason)

    def renew_lease(self, now: float) -> None:
        """Renew the lease, if P has started one and the last renewal was at least
        1 / RENEWALS_PER_LEASE of its duration ago. Call this several times a second."""
        limits = self.p.limits
        if not self.handle or limits is None:
            return
        if now - self._renewed_at >= limits.kv_lease_s / RENEWALS_PER_LEASE:
            self._renewed_at = now
            self.p.keep_kv([self.handle])

    def _on_report(self, report: Report) -> None:
        """Handle a report of P. Only the last one matters: P sends no tokens."""
        if isinstance(report, Accepted) or (isinstance(report, Output) and not report.finish):
            return
        self.is_open = False
        if isinstance(report, Output):
            self.handle = report.kv_handle
            self.usage = report.usage
            if not self.handle and report.error is None and report.finish != "abort":
                error = EngineError(NO_HANDLE).info()
                report = Output(request=report.request, finish="error", error=error)
        if self.readers:
            self._on_end(self, report)
        elif self.handle:
            self.p.release_kv([self.handle])


def _shared(options: GenerateOptions) -> GenerateOptions:
    """Return the options that are equal for all choices of a prompt. They are sent to P."""
    shared = options.copy()
    shared.pop("grammar", None)
    shared.pop("is_first", None)
    return shared
