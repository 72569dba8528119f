"""Fetches: blocks of a request that are being filled from elsewhere, by the worker.

A supplier says what it could bring for a request (`Match`); what brings most becomes a job. Until
the worker has reported on a job, its blocks and its request's slot are given to nobody: something
may still write. A request that ends meanwhile gives the job up, and its end is told at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from engine_core.request import Request
from protocol.arrays import Int32
from protocol.kv import KVCancel, KVFailure, KVFetch, KVFetched, KVReport, PeerSource, Source


@dataclass(frozen=True, slots=True)
class Match:
    """What can be brought for a request: the `num_blocks` blocks behind those that it has already.
    Then the K/V of its first `num_tokens` tokens is there."""

    source: Source
    num_blocks: int
    num_tokens: int

    @property
    def is_for_it(self) -> bool:
        """Another engine has computed it for this very request, as its handle says. What a tier
        has, nobody has computed for it, nor promised."""
        return isinstance(self.source, PeerSource)


class Supplier(Protocol):
    """Somewhere that K/V may come from."""

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """What it could bring for a request that has its first `num_blocks` blocks, and is about
        to be admitted; None where that is nothing more. Changes nothing."""
        ...


class FetchState(Enum):
    OUT = auto()  # the worker fills its blocks
    GIVEN_UP = auto()  # nobody waits for it, but the worker may still write
    ARRIVED = auto()  # final; the blocks hold what was asked for
    LOST = auto()  # final; nobody knows what the blocks hold
    DROPPED = auto()  # final; nobody wants to know


class FetchEvent(Enum):
    GIVE_UP = auto()
    FETCHED = auto()
    FAILED = auto()


NEXT_STATE = {
    (FetchState.OUT, FetchEvent.GIVE_UP): FetchState.GIVEN_UP,
    (FetchState.OUT, FetchEvent.FETCHED): FetchState.ARRIVED,
    (FetchState.OUT, FetchEvent.FAILED): FetchState.LOST,
    (
        FetchState.GIVEN_UP,
        FetchEvent.FETCHED,
    ): FetchState.DROPPED,  # it was done when it heard of it
    (FetchState.GIVEN_UP, FetchEvent.FAILED): FetchState.DROPPED,
}
"""A missing row is an illegal move."""


@dataclass(slots=True, eq=False)
class Fetch:
    """`error` is why it was lost; `seconds`, how long it took if it was not."""

    job: int
    request: Request
    match: Match
    asked_at: float
    state: FetchState = FetchState.OUT
    error: str = ""
    seconds: float = 0.0

    def move(self, event: FetchEvent) -> None:
        """Raises RuntimeError on an illegal move and changes nothing."""
        state = NEXT_STATE.get((self.state, event))
        if state is None:
            raise RuntimeError(f"fetch {self.job}: {event.name} is illegal in {self.state.name}")
        self.state = state


class Fetches:
    """All jobs of one engine that the worker has not reported on. `tell`: to the worker."""

    def __init__(
        self,
        suppliers: Sequence[Supplier],
        timeout_s: float,
        tell: Callable[[KVFetch | KVCancel], None],
    ) -> None:
        self.num_failed: Counter[str] = Counter()  # by kind
        self.num_tokens = 0  # that came from elsewhere
        self.num_bytes = 0
        self._suppliers = suppliers
        self._timeout_s = timeout_s
        self._tell = tell
        self._jobs: dict[int, Fetch] = {}  # oldest first
        self._job_of: dict[Request, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """The best of all suppliers."""
        found = (supplier.match(request, num_blocks) for supplier in self._suppliers)
        return max(filter(None, found), key=lambda match: match.num_tokens, default=None)

    def begin(self, request: Request, match: Match, blocks: list[int], now: float) -> None:
        """Have these blocks of `request` filled."""
        assert len(blocks) == match.num_blocks
        self._last += 1
        self._jobs[self._last] = Fetch(self._last, request, match, now)
        self._job_of[request] = self._last
        self._tell(
            KVFetch(
                job=self._last,
                source=match.source,
                blocks=Int32.of(blocks),
                timeout_s=self._timeout_s,
            )
        )

    def give_up(self, request: Request) -> None:
        """Nobody waits for this request's job any more."""
        fetch = self._jobs[self._job_of[request]]
        fetch.move(FetchEvent.GIVE_UP)
        self._tell(KVCancel(job=fetch.job))

    def hear(self, report: KVReport) -> list[Fetch]:
        """The jobs that are over. Raises RuntimeError on one that is not out."""
        over = [self._arrive(fetched) for fetched in report.fetched]
        return over + [self._fail(failure) for failure in report.failed]

    def longest_s(self, now: float) -> float:
        """How long the worker has owed its oldest report."""
        return max((now - fetch.asked_at for fetch in self._jobs.values()), default=0.0)

    def _arrive(self, fetched: KVFetched) -> Fetch:
        fetch = self._end(fetched.job, FetchEvent.FETCHED)
        fetch.seconds = fetched.seconds
        self.num_bytes += fetched.num_bytes
        if fetch.state is FetchState.ARRIVED:
            self.num_tokens += fetch.match.num_tokens - fetch.request.num_computed
        return fetch

    def _fail(self, failure: KVFailure) -> Fetch:
        fetch = self._end(failure.job, FetchEvent.FAILED)
        self.num_failed[failure.kind] += 1
        fetch.error = f"{failure.kind}: {failure.message}"
        return fetch

    def _end(self, job: int, event: FetchEvent) -> Fetch:
        fetch = self._jobs.pop(job, None)
        if fetch is None:
            raise RuntimeError(f"the worker reports on job {job}, which is not out")
        del self._job_of[fetch.request]
        fetch.move(event)
        return fetch
