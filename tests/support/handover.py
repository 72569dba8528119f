"""Fake K/V transfers between workers of one process.

They work with the blocks and checkpoints of echo workers and of real ones (replica.py). A fetch
copies those of the other worker when the test calls `carry_out`, so what is reused too early
arrives with wrong content. From the command until its report, the fetch's destination is filled
with BEING_WRITTEN, so an engine that uses it too early fails in the echo worker.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_core.kv.peers import PeerCluster
from engine_core.kv.transfers import KVCommand
from protocol.worker.kv import (
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
    """Maps each block, or each checkpoint, to its content. During a fetch, the content is a
    sequence of BEING_WRITTEN."""

    def __getitem__(self, block: int, /) -> Any: ...

    def __setitem__(self, block: int, content: Any, /) -> None: ...


@dataclass
class Export:
    kv: Blocks
    states: Blocks
    blocks: list[int]
    readers: int
    mover: EchoMover
    checkpoint: int | None


@dataclass
class KVNetwork:
    """The exports of all workers of a cluster, by (address, lease).

    fault   the kind of failure that every fetch reports; "": none
    """

    exports: dict[tuple[str, bytes], Export] = field(default_factory=dict)
    fault: str = ""

    def member(self, name: str, **changes: object) -> ClusterMember:
        """Return the membership of one more engine. `name` is its epoch, and its worker's address.

        changes   other fields of its worker's KVEndpoint
        """
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
    """The mover of one worker.

    jobs      fetches without a report yet, oldest first
    taken     leases that all readers have read, not reported yet
    commands  every command received
    """

    def __init__(
        self, place: ClusterMember, kv: Blocks, block_tokens: int, states: Blocks | None = None
    ) -> None:
        self.jobs: dict[int, KVFetch] = {}
        self.cancelled: set[int] = set()
        self.taken: list[bytes] = []
        self.commands: list[KVCommand] = []
        self._place = place
        self._kv = kv
        self._states: Blocks = {} if states is None else states
        self._block_tokens = block_tokens

    def apply(self, order: KVCommand) -> None:
        self.commands.append(order)
        exports, address = self._place.air.exports, self._place.address
        match order:
            case KVExport(lease=lease, blocks=blocks, readers=readers, checkpoint=checkpoint):
                assert (address, lease) not in exports, "one lease, exported twice"
                exports[address, lease] = Export(
                    self._kv, self._states, blocks.tolist(), readers, self, checkpoint
                )
            case KVWithdraw(lease=lease):
                exports.pop((address, lease), None)
            case KVFetch(job=job):
                assert job not in self.jobs, "a job's number, used again"
                self.jobs[job] = order
                spoil(self._kv, self._states, order, self._block_tokens)
            case KVCancel(job=job):
                self.cancelled.add(job)

    def carry_out(self, job: int, fault: str = "") -> KVReport:
        """Carry out a fetch, and return its report.

        fault   the kind of failure to report; "": none
        """
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
            spoil(self._kv, self._states, order, self._block_tokens)
            return KVReport(failed=[KVFailure(job, fault, "by request of the test")])
        assert export is not None
        wanted = export.blocks[source.first :][: len(order.blocks)]
        for theirs, ours in zip(wanted, order.blocks.tolist(), strict=True):
            self._kv[ours] = copy(export.kv[theirs])
        assert (order.checkpoint is None) == (export.checkpoint is None)
        if order.checkpoint is not None and export.checkpoint is not None:
            assert source.first + len(order.blocks) == len(export.blocks), "an earlier state"
            self._states[order.checkpoint] = copy(export.states[export.checkpoint])
        export.readers -= 1
        if not export.readers:
            del self._place.air.exports[source.address, source.lease]
            export.mover.taken.append(source.lease)
        return KVReport(fetched=[KVFetched(job, 100 * len(wanted), 0.5, "echo")])

    def report_taken(self) -> KVReport:
        taken, self.taken = self.taken, []
        return KVReport(taken=taken)


def spoil(kv: Blocks, states: Blocks, order: KVFetch, block_tokens: int) -> None:
    """Fill the blocks and the checkpoint of a fetch with BEING_WRITTEN."""
    for block in order.blocks.tolist():
        kv[block] = [BEING_WRITTEN] * block_tokens
    if order.checkpoint is not None:
        states[order.checkpoint] = (BEING_WRITTEN,)
