"""Leases: blocks kept for other engines after the request that filled them has ended.

A lease holds its blocks in the pool, as a request does, and ends exactly once: all its readers are
done (TAKE), it was released (RELEASE), its time is over (EXPIRE), or its blocks are needed here
(YIELD). KVWithdraw is sent to the worker before any plan or fetch that reuses the blocks. Times are
arguments, in seconds of a steady clock.

Three kinds of requests can make the oldest lease yield:

- a running request that cannot grow, always. It would have to be preempted otherwise, while the K/V
  of a lost lease can be recomputed by its reader;
- a waiting request, while leases hold more than MAX_LEASED_SHARE of all blocks;
- a waiting request with readers of its own, only if the lease was kept beyond its first term.
  Giving up K/V that is about to be fetched, for K/V that will be fetched later, gains nothing.

So no request waits longer than one term, even if two engines hold leases for requests in each
other's queue and their clients renew them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from engine_core.blocks.pool import BlockPool
from engine_core.request import Request, RequestPhase
from protocol.arrays import Int32
from protocol.kv import KVExport, KVWithdraw

MAX_LEASED_SHARE = 0.5
"""Leases may keep this share of all blocks from waiting requests."""


class LeaseState(Enum):
    OPEN = auto()  # holds its blocks; other workers may read them
    OVER = auto()  # final; holds nothing


class LeaseEvent(Enum):
    RENEW = auto()
    TAKE = auto()
    RELEASE = auto()
    EXPIRE = auto()
    YIELD = auto()


NEXT_STATE = {
    (LeaseState.OPEN, LeaseEvent.RENEW): LeaseState.OPEN,
    (LeaseState.OPEN, LeaseEvent.TAKE): LeaseState.OVER,
    (LeaseState.OPEN, LeaseEvent.RELEASE): LeaseState.OVER,
    (LeaseState.OPEN, LeaseEvent.EXPIRE): LeaseState.OVER,
    (LeaseState.OPEN, LeaseEvent.YIELD): LeaseState.OVER,
}
"""A missing row is an illegal move."""

CAUSES = {
    LeaseEvent.TAKE: "taken",
    LeaseEvent.RELEASE: "released",
    LeaseEvent.EXPIRE: "expired",
    LeaseEvent.YIELD: "yielded",
}
"""The cause of a lease's end, as metric label."""


@dataclass(slots=True, eq=False)
class KVLease:
    """One lease."""

    name: bytes
    #: In sequence order.
    blocks: list[int]
    #: End of its first term, which does not move.
    term: float
    #: When it expires; renewals move it.
    until: float
    state: LeaseState = LeaseState.OPEN

    def move(self, event: LeaseEvent) -> None:
        """Change the state. An illegal move raises RuntimeError and changes nothing."""
        state = NEXT_STATE.get((self.state, event))
        if state is None:
            raise RuntimeError(f"lease: {event.name} is illegal in {self.state.name}")
        self.state = state


class KVLeases:
    """All leases of one engine. `send` queues a command for the worker."""

    def __init__(
        self, pool: BlockPool, lease_s: float, send: Callable[[KVExport | KVWithdraw], None]
    ) -> None:
        self.num_ended: Counter[str] = Counter()  # by cause
        self._pool = pool
        self._lease_s = lease_s
        self._send = send
        self._open: dict[bytes, KVLease] = {}  # oldest first
        self._holders: Counter[int] = Counter()  # block -> leases that hold it

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def holders(self) -> Counter[int]:
        """Return a copy of block -> number of leases, for checks."""
        return Counter(self._holders)

    def announce(self, name: bytes, blocks: list[int], readers: int) -> None:
        """Announce a lease to the worker, before the plan that computes the last of its blocks.

        The worker must have the lease before any reader arrives with the handle: the reader's way
        may be shorter than the worker's own.
        """
        self._send(KVExport(lease=name, blocks=Int32.of(blocks), readers=readers))

    def retract(self, name: bytes) -> None:
        """Withdraw an announced lease that will not be opened."""
        self._send(KVWithdraw(lease=name))

    def open(self, name: bytes, blocks: list[int], now: float) -> None:
        """Hold these blocks, which were announced and have been computed."""
        assert name not in self._open, "two leases of one name"
        until = now + self._lease_s
        self._pool.share(blocks)
        self._holders.update(blocks)
        self._open[name] = KVLease(name, list(blocks), until, until)

    def renew(self, name: bytes, now: float) -> None:
        if (lease := self._open.get(name)) is not None:
            lease.move(LeaseEvent.RENEW)
            lease.until = now + self._lease_s

    def on_taken(self, name: bytes) -> None:
        self._end(name, LeaseEvent.TAKE)

    def release(self, name: bytes) -> None:
        self._end(name, LeaseEvent.RELEASE)

    def expire(self, now: float) -> None:
        for lease in [lease for lease in self._open.values() if lease.until < now]:
            self._end(lease.name, LeaseEvent.EXPIRE)

    def yield_oldest(self, request: Request, now: float) -> bool:
        """End the oldest lease if `request` may have its blocks. Return whether it did."""
        oldest = next(iter(self._open.values()), None)
        if oldest is None or not self._may_yield(oldest, request, now):
            return False
        self._end(oldest.name, LeaseEvent.YIELD)
        return True

    def _may_yield(self, lease: KVLease, request: Request, now: float) -> bool:
        if request.phase is RequestPhase.RUNNING or lease.term < now:
            return True
        return not request.kv_readers and self.num_blocks > MAX_LEASED_SHARE * self._pool.total

    def _end(self, name: bytes, event: LeaseEvent) -> None:
        """End a lease. A lease that has already ended is ignored."""
        lease = self._open.pop(name, None)
        if lease is None:
            return
        lease.move(event)
        self.num_ended[CAUSES[event]] += 1
        self._send(KVWithdraw(lease=name))  # a handle may be used again after all its readers
        self._holders -= Counter(lease.blocks)
        self._pool.release(lease.blocks)
