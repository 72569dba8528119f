"""Workers that hand over K/V within one process: what `KVExport` ... `KVCancel` ask for, one job at
a time, between blocks of any kind: those of echo workers, or of real ones (replica.py).

A fetch copies what the other worker's blocks hold at the moment when the test lets it (`do`), so
blocks that are reused too early arrive wrong. From the order until the report its own blocks hold
what nobody may read, and are written once more just before the report: who reuses them too early is
found out by the echo worker's attention.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_core.kv.peers import PeerCluster
from engine_core.kv.transfers import KVCommand
from protocol.kv import (
    KVCancel,
    KVEndpoint,
    KVExport,
    KVFailure,
    KVFetch,
    KVFetched,
    KVReport,
    KVWithdraw,
    PeerSource,
)

LAYOUT = b"echo layout"
BEING_WRITTEN = -1


class Blocks(Protocol):
    """block -> what it holds; or a list of BEING_WRITTEN, while nobody may read it."""

    def __getitem__(self, block: int, /) -> Any: ...

    def __setitem__(self, block: int, content: Any, /) -> None: ...


@dataclass
class Export:
    kv: Blocks
    blocks: list[int]
    readers: int
    mover: EchoMover


@dataclass
class KVNetwork:
    """What all workers of a cluster can reach: (address, lease) -> export.

    fault   the kind of failure that every fetch has; "": none
    """

    exports: dict[tuple[str, bytes], Export] = field(default_factory=dict)
    fault: str = ""

    def member(self, name: str, **changes: object) -> ClusterMember:
        """For one more engine. `changes`: fields of its worker's KVEndpoint."""
        fields: dict[str, object] = {
            "address": name,
            "layout": LAYOUT,
            "layout_text": "echo, blocks alike",
            "mover": "echo",
        }
        endpoint = KVEndpoint(**(fields | changes))  # type: ignore[arg-type]
        return ClusterMember(self, PeerCluster(b"k" * 32, epoch=name, endpoint=endpoint))


@dataclass(frozen=True)
class ClusterMember:
    air: KVNetwork
    cluster: PeerCluster

    @property
    def address(self) -> str:
        assert self.cluster.endpoint is not None
        return self.cluster.endpoint.address


class EchoMover:
    """One worker's mover.

    jobs   fetches that it was asked for and has not reported on, oldest first
    taken  leases all of whose readers are done, to be reported
    heard  every order, for tests to look at
    """

    def __init__(self, place: ClusterMember, kv: Blocks, block_tokens: int) -> None:
        self.jobs: dict[int, KVFetch] = {}
        self.cancelled: set[int] = set()
        self.taken: list[bytes] = []
        self.commands: list[KVCommand] = []
        self._place = place
        self._kv = kv
        self._block_tokens = block_tokens

    def apply(self, order: KVCommand) -> None:
        self.commands.append(order)
        exports, address = self._place.air.exports, self._place.address
        match order:
            case KVExport(lease=lease, blocks=blocks, readers=readers):
                assert (address, lease) not in exports, "one lease, exported twice"
                exports[address, lease] = Export(self._kv, blocks.tolist(), readers, self)
            case KVWithdraw(lease=lease):
                exports.pop((address, lease), None)
            case KVFetch(job=job):
                assert job not in self.jobs, "a job's number, used again"
                self.jobs[job] = order
                spoil(self._kv, order, self._block_tokens)
            case KVCancel(job=job):
                self.cancelled.add(job)

    def carry_out(self, job: int, fault: str = "") -> KVReport:
        """Carry a job out, as far as it can be; `fault`: the kind of failure it is to have."""
        order = self.jobs.pop(job)
        fault = fault or self._place.air.fault
        if job in self.cancelled:
            fault = "cancelled"
        source = order.source
        assert isinstance(source, PeerSource)
        export = self._place.air.exports.get((source.address, source.lease))
        if export is None:
            fault = fault or "expired"
        if fault:
            spoil(self._kv, order, self._block_tokens)
            return KVReport(failed=[KVFailure(job, fault, "as the test wants it")])
        assert export is not None
        wanted = export.blocks[source.first :][: len(order.blocks)]
        for theirs, ours in zip(wanted, order.blocks.tolist(), strict=True):
            self._kv[ours] = copy(export.kv[theirs])
        export.readers -= 1
        if not export.readers:
            del self._place.air.exports[source.address, source.lease]
            export.mover.taken.append(source.lease)
        return KVReport(fetched=[KVFetched(job, 100 * len(wanted), 0.5, "echo")])

    def report_taken(self) -> KVReport:
        taken, self.taken = self.taken, []
        return KVReport(taken=taken)


def spoil(kv: Blocks, order: KVFetch, block_tokens: int) -> None:
    """The blocks that a fetch is for hold what nobody may read."""
    for block in order.blocks.tolist():
        kv[block] = [BEING_WRITTEN] * block_tokens
