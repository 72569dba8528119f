"""Fetches: the worker fills a request's blocks from another engine or a tier.

Each supplier returns the K/V that it has for a request (`Match`), and the longest match becomes a
job. Until the worker has reported on the job, its blocks and its request's slot are not reused,
because the worker may still write to the blocks. If the request ends earlier, the job is cancelled,
and the client receives its final Output at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from engine_core.requests.request import Request
from protocol.machine import Machine
from protocol.wire.arrays import Int32
from protocol.worker.kv import KVCancel, KVFailure, KVFetch, KVFetched, KVReport, PeerSource, Source


@dataclass(frozen=True, slots=True)
class Match:
    """K/V that can be fetched for a request.

    The fetch fills `num_blocks` blocks, which follow the blocks that the prefix cache has filled.
    After the fetch, the request has the K/V of its first `num_tokens` tokens. If the model has a
    recurrent state, the last of these tokens ends a block, and the state after it comes along.
    """

    source: Source
    num_blocks: int
    num_tokens: int

    @property
    def is_handed_over(self) -> bool:
        """Whether the K/V was handed over: another engine computed it for this request's handle. It
        is false for blocks of a tier."""
        return isinstance(self.source, PeerSource)


class Supplier(Protocol):
    """A source of K/V: other engines, or the tiers."""

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Return the K/V that can be fetched for a request about to be admitted, or None. The K/V
        of the first `num_blocks` blocks is already in the prefix cache."""
        ...


class FetchState(Enum):
    OPEN = auto()  # the worker is filling the blocks
    CANCELLED = auto()  # the request has ended, but the worker may still write to the blocks
    ARRIVED = auto()  # final; the blocks hold the requested K/V
    LOST = auto()  # final; the fetch failed, so the blocks' content is undefined
    DROPPED = auto()  # final; the fetch was cancelled, and the worker has reported on it


class FetchEvent(Enum):
    CANCEL = auto()
    FETCHED = auto()
    FAILED = auto()


FETCH_MACHINE = Machine(
    "fetch",
    starts=(FetchState.OPEN,),
    rows={
        (FetchState.OPEN, FetchEvent.CANCEL): FetchState.CANCELLED,
        (FetchState.OPEN, FetchEvent.FETCHED): FetchState.ARRIVED,
        (FetchState.OPEN, FetchEvent.FAILED): FetchState.LOST,
        # the fetch was complete before KVCancel arrived
        (FetchState.CANCELLED, FetchEvent.FETCHED): FetchState.DROPPED,
        (FetchState.CANCELLED, FetchEvent.FAILED): FetchState.DROPPED,
    },
)


@dataclass(slots=True, eq=False)
class Fetch:
    """One fetch of K/V by the worker, from another engine or from a tier, for one request."""

    job: int
    request: Request
    match: Match
    started_at: float
    state: FetchState = FetchState.OPEN
    #: Why the fetch failed; "" if it has not.
    error: str = ""
    #: How long the fetch took, as reported by the worker.
    seconds: float = 0.0

    def move(self, event: FetchEvent) -> None:
        """Change the state. Raises IllegalMove and changes nothing if it does not admit `event`."""
        self.state = FETCH_MACHINE.move(self.state, event, subject=self.job)


class Fetches:
    """The fetches that the worker has not reported on. `send` queues a command for the worker."""

    def __init__(
        self,
        suppliers: Sequence[Supplier],
        timeout_s: float,
        send: Callable[[KVFetch | KVCancel], None],
    ) -> None:
        self.num_failed: Counter[str] = Counter()  # by kind of failure
        self.num_tokens = 0  # total number of fetched tokens
        self.num_bytes = 0  # total number of fetched bytes
        self._suppliers = suppliers
        self._timeout_s = timeout_s
        self._send = send
        self._jobs: dict[int, Fetch] = {}  # oldest first
        self._jobs_by_request: dict[Request, int] = {}
        self._last_job = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Return the longest match of all suppliers for a request whose first `num_blocks` blocks
        are cached; None if no supplier has one."""
        found = (supplier.match(request, num_blocks) for supplier in self._suppliers)
        return max(filter(None, found), key=lambda match: match.num_tokens, default=None)

    def start(
        self, request: Request, match: Match, blocks: list[int], checkpoint: int | None, now: float
    ) -> None:
        """Start the fetch of `match` into `blocks` and `checkpoint`, which `request` holds, at time
        `now`. `checkpoint` is None if the model has no recurrent state."""
        assert len(blocks) == match.num_blocks
        self._last_job += 1
        self._jobs[self._last_job] = Fetch(self._last_job, request, match, now)
        self._jobs_by_request[request] = self._last_job
        self._send(
            KVFetch(
                job=self._last_job,
                source=match.source,
                blocks=Int32.of(blocks),
                timeout_s=self._timeout_s,
                checkpoint=checkpoint,
            )
        )

    def cancel(self, request: Request) -> None:
        """Cancel the request's fetch. It stays open until the worker has reported on it."""
        fetch = self._jobs[self._jobs_by_request[request]]
        fetch.move(FetchEvent.CANCEL)
        self._send(KVCancel(job=fetch.job))

    def on_kv_report(self, report: KVReport) -> list[Fetch]:
        """Apply a report, and return the fetches that it ends: completed, failed or cancelled.
        Raises RuntimeError if the report names a job that is not open."""
        over = [self._on_fetched(fetched) for fetched in report.fetched]
        return over + [self._on_failed(failure) for failure in report.failed]

    def oldest_s(self, now: float) -> float:
        """Return the age in seconds of the oldest fetch without a report; 0 if there is none."""
        return max((now - fetch.started_at for fetch in self._jobs.values()), default=0.0)

    def _on_fetched(self, fetched: KVFetched) -> Fetch:
        fetch = self._end(fetched.job, FetchEvent.FETCHED)
        fetch.seconds = fetched.seconds
        self.num_bytes += fetched.num_bytes
        if fetch.state is FetchState.ARRIVED:
            self.num_tokens += fetch.match.num_tokens - fetch.request.num_computed
        return fetch

    def _on_failed(self, failure: KVFailure) -> Fetch:
        fetch = self._end(failure.job, FetchEvent.FAILED)
        self.num_failed[failure.kind] += 1
        fetch.error = f"{failure.kind}: {failure.message}"
        return fetch

    def _end(self, job: int, event: FetchEvent) -> Fetch:
        fetch = self._jobs.pop(job, None)
        if fetch is None:
            raise RuntimeError(f"the worker reports on job {job}, which is not open")
        del self._jobs_by_request[fetch.request]
        fetch.move(event)
        return fetch
