"""Loads blocks from host memory or disk into the cache, one job after another.

Nothing else uses the cache blocks of a job until the job ends (protocol/worker/kv.py). A failed job
leaves them with arbitrary contents and reports a reason; the engine then computes their K/V
instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from protocol.worker.kv import KVFailure, KVFetch, KVFetched, TierSource
from worker.device.staging import integers
from worker.kv.blocks import CacheBlocks
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.changes import Counts
from worker.kv.tiers.disk import BlockLost, DamagedBlockFile, DiskTier
from worker.kv.tiers.host import HostMemory, HostTier
from worker.kv.transfer.exports import Ids

MOVER = "tier"


class TierReadEnded(Exception):
    """Raised to end a job early. `kind` is one of the values of KVFailure.kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class TierOrder:
    """A queued job. Its blocks may be written only after `fence` (CacheBlocks.fence)."""

    fetch: KVFetch
    source: TierSource
    fence: object
    deadline: float


class TierReader:
    """Thread that runs the jobs in the order in which they were queued.

    blocks    the cache's blocks
    host      None: blocks are read from disk only, and are not kept in host memory
    scratch   a place of `memory` that `host` does not use, for blocks that get no place in `host`
    """

    def __init__(
        self,
        blocks: CacheBlocks,
        host: HostTier | None,
        memory: HostMemory,
        scratch: int,
        disk: DiskTier | None,
        counts: Counts,
        reports: ReportQueue,
    ) -> None:
        self._blocks = blocks
        self._host, self._memory, self._disk = host, memory, disk
        self._scratch = scratch
        self._counts = counts
        self._reports = reports
        self._orders: SimpleQueue[TierOrder | None] = SimpleQueue()
        self._open: set[int] = set()
        self._thread = Thread(target=reports.guard(self._run), name="kv tier reader", daemon=True)
        self._thread.start()

    # ---- called by the loop

    def fetch(self, fetch: KVFetch, source: TierSource) -> None:
        """Queue the job of `fetch`, whose source is `source`."""
        self._open.add(fetch.job)
        deadline = time.monotonic() + fetch.timeout_s
        self._orders.put(TierOrder(fetch, source, self._blocks.fence(), deadline))

    def cancel(self, job: int) -> None:
        """Request the end of a job. The thread may write the job's blocks until it reports the
        job."""
        self._open.discard(job)

    def close(self) -> None:
        """Stop the thread after the current block. The jobs that remain fail as cancelled."""
        self._open.clear()
        self._orders.put(None)
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            started = time.perf_counter()
            job, source = order.fetch.job, order.source
            try:
                self._load_all(order)
            except TierReadEnded as error:
                self._reports.add_result(KVFailure(job, error.kind, str(error)))
            else:
                num_bytes = len(source.hashes) * self._memory.block_bytes
                seconds = time.perf_counter() - started
                self._reports.add_result(KVFetched(job, num_bytes, seconds, MOVER))
            self._open.discard(job)

    def _load_all(self, order: TierOrder) -> None:
        self._blocks.wait_for(order.fence)
        ids = integers(order.fetch.blocks.data)
        for index, content in enumerate(order.source.hashes):
            if order.fetch.job not in self._open:
                raise TierReadEnded("cancelled", "cancelled by the engine")
            if time.monotonic() > order.deadline:
                raise TierReadEnded("timeout", f"it took longer than {order.fetch.timeout_s:g} s")
            self._load(content, ids[index : index + 1])

    def _load(self, content: bytes, block: Ids) -> None:
        if self._host is not None and (place := self._host.hold(content)) is not None:
            self._put(place, block)
            self._host.release(content)
            self._counts.add("host", "loaded")
        elif self._disk is not None:
            self._load_from_disk(self._disk, content, block)
            self._counts.add("disk", "loaded")
        else:
            self._counts.add("host", "failed")
            raise TierReadEnded("lost", f"block {content.hex()[:12]} is no longer in host memory")

    def _load_from_disk(self, disk: DiskTier, content: bytes, block: Ids) -> None:
        """Load a block from disk through host memory. Keep the block there if there is a host tier
        with a place for it."""
        place = None if self._host is None else self._host.reserve()
        via = self._scratch if place is None else place
        try:
            disk.load(content, self._memory.payload(via))
        except (BlockLost, DamagedBlockFile) as error:
            if self._host is not None and place is not None:
                self._host.give_back(place)
            self._counts.add("disk", "failed")
            kind = "lost" if isinstance(error, BlockLost) else "damaged"
            raise TierReadEnded(kind, f"block {content.hex()[:12]}: {error}") from None
        self._put(via, block)
        if self._host is not None and place is not None:
            self._host.publish(content, place)

    def _put(self, place: int, block: Ids) -> None:
        """Copy a place to a block of the cache. Wait for the copy, so that `place` may be
        reused."""
        self._blocks.put(0, self._blocks.num_rows, block, self._memory.pieces(place))
        self._blocks.synchronize()
