"""One prompt that a prefill engine P computes for all its choices, and the lease of its K/V.

The prompt is open at P from `send` until P's last report. Then P keeps the K/V under a lease, which
`keep` renews. A choice that no longer needs the K/V calls `leave`. When the last one has left, a
running computation is stopped, kept K/V is released, and a handle that arrives later is released at
once.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.engine.base import Report
from gateway.engine.client import ZmqEngineClient
from protocol.arrays import Int32
from protocol.errors import EngineError
from protocol.messages import Accepted, Output, Usage
from protocol.sampling import SamplingParams
from protocol.session import GenerateOptions

KEEPS_PER_LEASE = 3
NO_HANDLE = "the prefill engine returned no K/V handle: check its role and its cluster key"


class RemotePrefill:
    """A prompt that P computes.

    p          the prefill engine
    options    of the request; the grammar is used by D only
    on_end     called once with P's last report, if there are readers; `handle` is set on success
    handle     identifies the K/V for D; "" before the end
    usage      P's usage; None before the end
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
        self.readers: set[int] = set()
        self.handle = ""
        self.usage: Usage | None = None
        self.is_open = False
        self._on_end = on_end
        self._request = 0
        self._kept_at = 0.0

    def is_for(self, prompt: Int32, options: GenerateOptions) -> bool:
        """Return whether a request can share this prefill, as another choice of the same prompt.

        The choices of a prompt have the same `prompt` object and equal options, except the grammar
        and `is_first`.
        """
        return self.prompt is prompt and self._shared == _shared(options)

    def send(self) -> None:
        """Send the request, once all readers have been added. Do nothing if all have left."""
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

    def leave(self, reader: int) -> None:
        self.readers.discard(reader)
        if self.readers:
            return
        if self.handle:
            self.p.release_kv([self.handle])
        elif self.is_open:
            self.p.stop(self._request)

    def keep(self, now: float) -> None:
        """Renew the lease if necessary. Must be called several times a second."""
        limits = self.p.limits
        if not self.handle or limits is None:
            return
        if now - self._kept_at >= limits.kv_lease_s / KEEPS_PER_LEASE:
            self._kept_at = now
            self.p.keep_kv([self.handle])

    def _on_report(self, report: Report) -> None:
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
    """Return the options that all choices of a prompt share and that are sent to P."""
    shared = options.copy()
    shared.pop("grammar", None)
    shared.pop("is_first", None)
    return shared
