"""A prompt that one P computes for all who asked for it together, and what becomes of the K/V.

From `ask` until P's end it is open there; then P keeps the K/V under a lease, whose time is counted
anew with every `keep`. Who needs it no longer says `leave`; when the last one has left, P is told,
wherever it is: what still computes is stopped, what is kept is released, and a handle that was on
its way by then is released as soon as it comes.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.engine.client import Report, ZmqEngineClient
from protocol.arrays import Int32
from protocol.errors import EngineError
from protocol.messages import Accepted, Output, Usage
from protocol.sampling import SamplingParams
from protocol.session import GenerateOptions

KEEPS_PER_LEASE = 3
NO_HANDLE = "the engine handed nothing over: is its role prefill, and has it a cluster key?"


class RemotePrefill:
    """p          who computes it
    terms      of the request that it is for; its grammar is D's
    on_end     called once with P's last word, if anybody is left to hear it; with a `handle`, it
               went well
    handle     what the readers give to D; "" before the end
    usage      what it cost P; None before the end
    """

    def __init__(
        self,
        p: ZmqEngineClient,
        prompt: Int32,
        terms: GenerateOptions,
        on_end: Callable[[RemotePrefill, Report], None],
    ) -> None:
        self.p = p
        self.prompt = prompt
        self._shared = _shared(terms)
        self._is_first = terms.get("is_first", True)
        self.readers: set[int] = set()
        self.handle = ""
        self.usage: Usage | None = None
        self.is_open = False
        self._on_end = on_end
        self._request = 0
        self._kept_at = 0.0

    def is_for(self, prompt: Int32, terms: GenerateOptions) -> bool:
        """The choices of one prompt are asked for with one and the same object."""
        return self.prompt is prompt and self._shared == _shared(terms)

    def ask(self) -> None:
        """Once, when all readers are there; if any of them still is."""
        if not self.readers:
            return
        self.is_open = True
        try:
            terms: GenerateOptions = {
                **self._shared,
                "kv_readers": len(self.readers),
                "is_first": self._is_first,
            }
            self._request = self.p.generate(self.prompt, SamplingParams(), self._take, **terms)
        except EngineError as error:
            self._take(Output(request=0, finish="error", error=error.info()))

    def leave(self, reader: int) -> None:
        self.readers.discard(reader)
        if self.readers:
            return
        if self.handle:
            self.p.release_kv([self.handle])
        elif self.is_open:
            self.p.stop(self._request)

    def keep(self, now: float) -> None:
        """Call several times a second while there are readers."""
        limits = self.p.limits
        if not self.handle or limits is None:
            return
        if now - self._kept_at >= limits.kv_lease_s / KEEPS_PER_LEASE:
            self._kept_at = now
            self.p.keep_kv([self.handle])

    def _take(self, report: Report) -> None:
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


def _shared(terms: GenerateOptions) -> GenerateOptions:
    """What all choices of a prompt say alike, and P is told."""
    shared = terms.copy()
    shared.pop("grammar", None)
    shared.pop("is_first", None)
    return shared
