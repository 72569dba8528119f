"""Leases: they keep a request's blocks for other engines after the request has ended.

A lease holds its blocks in the pool, as a request does. If the model has a recurrent state, it also
holds the checkpoint with the state after them. It ends exactly once, for one of four reasons: all
its readers are done (TAKE), a client released it (RELEASE), its time is over (EXPIRE), or this
engine needs the blocks (YIELD). KVWithdraw is sent to the worker before any plan or fetch that
reuses the blocks. Times are arguments, in seconds of a steady clock.

The oldest lease yields in these cases:

- A running request needs a block. Without the block, it would be preempted. The reader of the lost
  lease can recompute the K/V.
- A waiting request needs blocks, or a checkpoint, and the lease has been renewed beyond its first
  term.
- A waiting request without readers needs blocks, and leases hold more than MAX_LEASED_SHARE of all
  blocks. A request with readers would itself end in a lease, so nothing would be gained.

So no request waits for leases longer than one term, even if two engines hold leases for requests in
each other's queue and the clients renew them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from engine_core.blocks.pool import BlockPool
from engine_core.requests.request import Request, RequestPhase
from protocol.machine import Machine
from protocol.wire.arrays import Int32
from protocol.worker.kv import KVExport, KVWithdraw
from protocol.worker.steps import NO_CHECKPOINT

MAX_LEASED_SHARE = 0.5
"""Largest share of all blocks that leases may hold while requests wait for blocks."""


class LeaseState(Enum):
    OPEN = auto()  # holds its blocks; other workers may read them
    OVER = auto()  # final; holds nothing


class LeaseEvent(Enum):
    RENEW = auto()
    TAKE = auto()
    RELEASE = auto()
    EXPIRE = auto()
    YIELD = auto()


LEASE_MACHINE = Machine(
    "lease",
    starts=(LeaseState.OPEN,),
    rows={
        (LeaseState.OPEN, LeaseEvent.RENEW): LeaseState.OPEN,
        (LeaseState.OPEN, LeaseEvent.TAKE): LeaseState.OVER,
        (LeaseState.OPEN, LeaseEvent.RELEASE): LeaseState.OVER,
        (LeaseState.OPEN, LeaseEvent.EXPIRE): LeaseState.OVER,
        (LeaseState.OPEN, LeaseEvent.YIELD): LeaseState.OVER,
    },
)

CAUSES = {
    LeaseEvent.TAKE: "taken",
    LeaseEvent.RELEASE: "released",
    LeaseEvent.EXPIRE: "expired",
    LeaseEvent.YIELD: "yielded",
}
"""The metric label for each cause of a lease's end."""


@dataclass(slots=True, eq=False)
class KVLease:
    """The blocks of one prompt, kept for the engines that will read them."""

    name: bytes
    #: Block ids, in sequence order.
    blocks: list[int]
    #: Checkpoint of the state after the blocks; NO_CHECKPOINT: the model has no state.
    checkpoint: int
    #: End of the lease's first term. Renewals do not change it.
    term: float
    #: Time at which the lease expires. Renewals move it.
    until: float
    state: LeaseState = LeaseState.OPEN

    def move(self, event: LeaseEvent) -> None:
        """Change the state. Raises IllegalMove and changes nothing if it does not admit `event`."""
        self.state = LEASE_MACHINE.move(self.state, event)


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
        """The number of distinct blocks that leases hold."""
        return len(self._holders)

    @property
    def holders(self) -> Counter[int]:
        """A copy of the mapping from block to number of leases, for checks."""
        return Counter(self._holders)

    @property
    def checkpoints(self) -> list[int]:
        """The checkpoint of each lease that has one, for checks."""
        return [lease.checkpoint for lease in self._open.values() if lease.checkpoint]

    def announce(
        self, name: bytes, blocks: list[int], readers: int, checkpoint: int | None
    ) -> None:
        """Announce a lease to the worker, before the plan that computes the last of its blocks.

        The worker must have the lease before the first reader connects with the handle. If the
        lease were sent after the step, a fast reader could connect first.
        """
        self._send(
            KVExport(lease=name, blocks=Int32.of(blocks), readers=readers, checkpoint=checkpoint)
        )

    def retract(self, name: bytes) -> None:
        """Withdraw an announced lease that will not be opened."""
        self._send(KVWithdraw(lease=name))

    def open(self, request: Request, now: float) -> None:
        """Open the announced lease of a request after its blocks were computed. It then holds the
        blocks, and takes over the checkpoint that the request keeps."""
        name, blocks, until = request.lease, list(request.blocks), now + self._lease_s
        assert name not in self._open, "two leases have the same name"
        self._pool.share(blocks)
        self._holders.update(blocks)
        self._open[name] = KVLease(name, blocks, request.kept_checkpoint, until, until)
        request.kept_checkpoint = NO_CHECKPOINT

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
        """End the oldest lease if, by the rules at the top of this file, it yields to `request`.
        Return whether it ended; False if there is no lease."""
        oldest = next(iter(self._open.values()), None)
        if oldest is None or not self._may_yield(oldest, request, now):
            return False
        self._end(oldest.name, LeaseEvent.YIELD)
        return True

    def _may_yield(self, lease: KVLease, request: Request, now: float) -> bool:
        """Return whether the lease yields to `request`, by the rules at the top of this file."""
        if request.phase is RequestPhase.RUNNING or lease.term < now:
            return True
        return not request.kv_readers and self.num_blocks > MAX_LEASED_SHARE * self._pool.total

    def _end(self, name: bytes, event: LeaseEvent) -> None:
        """End the lease with this name. Do nothing if it has already ended."""
        lease = self._open.pop(name, None)
        if lease is None:
            return
        lease.move(event)
        self.num_ended[CAUSES[event]] += 1
        # Sent even after TAKE: otherwise a client could use the handle once more.
        self._send(KVWithdraw(lease=name))
        self._holders -= Counter(lease.blocks)
        self._pool.release(lease.blocks)
        checkpoints = self._pool.cache.checkpoints
        if lease.checkpoint and checkpoints is not None:
            checkpoints.release(lease.checkpoint)
