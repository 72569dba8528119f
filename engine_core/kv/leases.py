"""Leases: blocks that an engine keeps for others after the request that filled them has ended.

A lease holds its blocks in the pool, as a request does, and ends exactly once: all its readers are
done (TAKE), nobody will come (RELEASE), its time is over (EXPIRE), or its blocks are needed here
(YIELD). The worker is told before the blocks can have other content: KVWithdraw goes out before
whatever plan or fetch reuses them. Times are arguments, in seconds of a steady clock.

Who may make leases yield, oldest first: a request that is running and cannot grow, always (it
would have to be preempted, and whoever loses a lease can compute the same again); one that waits,
while leases hold more than their share; one that waits to be computed for others, only leases that
were kept beyond their first term: to give up what is about to be fetched for what will be fetched
later helps nobody. So nobody waits for longer than a term, also where two engines hold leases for
requests that wait in each other's queue, and clients keep them.
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

SHARE = 0.5
"""Of all blocks, so many may be kept from requests that wait."""


class LeaseState(Enum):
    OPEN = auto()  # holds its blocks; the worker lets others read them
    OVER = auto()  # final; holds nothing


class LeaseEvent(Enum):
    KEEP = auto()
    TAKE = auto()
    RELEASE = auto()
    EXPIRE = auto()
    YIELD = auto()


NEXT_STATE = {
    (LeaseState.OPEN, LeaseEvent.KEEP): LeaseState.OPEN,
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
"""What ends a lease, as it is counted."""


@dataclass(slots=True, eq=False)
class KVLease:
    """`blocks` in the order of the sequence; it is over after `until`, which may move; its first
    `term` does not."""

    name: bytes
    blocks: list[int]
    term: float
    until: float
    state: LeaseState = LeaseState.OPEN

    def move(self, event: LeaseEvent) -> None:
        """Raises RuntimeError on an illegal move and changes nothing."""
        state = NEXT_STATE.get((self.state, event))
        if state is None:
            raise RuntimeError(f"lease: {event.name} is illegal in {self.state.name}")
        self.state = state


class KVLeases:
    """All leases of one engine. `tell`: to the worker."""

    def __init__(
        self, pool: BlockPool, lease_s: float, tell: Callable[[KVExport | KVWithdraw], None]
    ) -> None:
        self.num_ended: Counter[str] = Counter()  # by cause
        self._pool = pool
        self._lease_s = lease_s
        self._tell = tell
        self._open: dict[bytes, KVLease] = {}  # oldest first
        self._holders: Counter[int] = Counter()  # block -> leases that hold it

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def holders(self) -> Counter[int]:
        """A copy, for checks."""
        return Counter(self._holders)

    def announce(self, name: bytes, blocks: list[int], readers: int) -> None:
        """The step that is about to be told computes the last of what readers of these blocks want.

        The worker hears of the lease before that step, so it knows it when whoever has been told
        the handle comes: that way may be shorter than the worker's own.
        """
        self._tell(KVExport(lease=name, blocks=Int32.of(blocks), readers=readers))

    def retract(self, name: bytes) -> None:
        """What was announced will not be opened."""
        self._tell(KVWithdraw(lease=name))

    def open(self, name: bytes, blocks: list[int], now: float) -> None:
        """Hold these blocks, too, which have been announced and computed."""
        assert name not in self._open, "two leases of one name"
        until = now + self._lease_s
        self._pool.share(blocks)
        self._holders.update(blocks)
        self._open[name] = KVLease(name, list(blocks), until, until)

    def keep(self, name: bytes, now: float) -> None:
        if (lease := self._open.get(name)) is not None:
            lease.move(LeaseEvent.KEEP)
            lease.until = now + self._lease_s

    def take(self, name: bytes) -> None:
        self._end(name, LeaseEvent.TAKE)

    def release(self, name: bytes) -> None:
        self._end(name, LeaseEvent.RELEASE)

    def expire(self, now: float) -> None:
        for lease in [lease for lease in self._open.values() if lease.until < now]:
            self._end(lease.name, LeaseEvent.EXPIRE)

    def make_way(self, request: Request, now: float) -> bool:
        """Give the oldest lease up for `request`, if it may have that; False: there is none."""
        oldest = next(iter(self._open.values()), None)
        if oldest is None or not self._yields(oldest, request, now):
            return False
        self._end(oldest.name, LeaseEvent.YIELD)
        return True

    def _yields(self, lease: KVLease, request: Request, now: float) -> bool:
        if request.phase is RequestPhase.RUNNING or lease.term < now:
            return True
        return not request.kv_readers and self.num_blocks > SHARE * self._pool.total

    def _end(self, name: bytes, event: LeaseEvent) -> None:
        """Of a lease that is over already nobody need hear."""
        lease = self._open.pop(name, None)
        if lease is None:
            return
        lease.move(event)
        self.num_ended[CAUSES[event]] += 1
        self._tell(KVWithdraw(lease=name))  # a handle may come again, though all readers were here
        self._holders -= Counter(lease.blocks)
        self._pool.release(lease.blocks)
