"""Loading: jobs that fill blocks of the cache from host memory or disk, one after another.

The blocks belong to the job alone until it is over (protocol/kv.py). A job that fails leaves
anything in them, and says why; the engine then computes what they should have held.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from protocol.kv import KVFailure, KVFetch, KVFetched, TierSource
from worker.kv.blocks import CacheBlocks
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.block_file import DamagedBlockFile
from worker.kv.tiers.counts import Counts
from worker.kv.tiers.disk import BlockLost, DiskTier
from worker.kv.tiers.host import HostTier
from worker.kv.tiers.memory import HostMemory
from worker.kv.transfer.exports import Ids
from worker.slots.staging import integers

MOVER = "tier"


class TierReadEnded(Exception):
    """A job is over before its time; `kind` as in KVFailure."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class TierOrder:
    """fence: the steps after which its blocks may be written (Blocks.fence)."""

    fetch: KVFetch
    source: TierSource
    fence: object
    deadline: float


class TierReader:
    """blocks     of the cache
    host       None: only the disk is looked at, and what it has is not kept in host memory
    scratch    a place of `memory` for what has no place in `host`
    """

    def __init__(
        self,
        blocks: CacheBlocks,
        host: HostTier | None,
        memory: HostMemory,
        scratch: int,
        disk: DiskTier | None,
        counts: Counts,
        news: ReportQueue,
    ) -> None:
        self._blocks = blocks
        self._host, self._memory, self._disk = host, memory, disk
        self._scratch = scratch
        self._counts = counts
        self._news = news
        self._orders: SimpleQueue[TierOrder | None] = SimpleQueue()
        self._open: set[int] = set()
        self._thread = Thread(target=news.guard(self._run), name="kv loader", daemon=True)
        self._thread.start()

    # ---- by the loop

    def fetch(self, fetch: KVFetch, source: TierSource) -> None:
        """source: the fetch's."""
        self._open.add(fetch.job)
        deadline = time.monotonic() + fetch.timeout_s
        self._orders.put(TierOrder(fetch, source, self._blocks.fence(), deadline))

    def cancel(self, job: int) -> None:
        """One that is over is over."""
        self._open.discard(job)

    def close(self) -> None:
        """Waits for the block at hand; what is not done then is nobody's concern any more."""
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
            except TierReadEnded as end:
                self._news.add_end(KVFailure(job, end.kind, str(end)))
            else:
                num_bytes = len(source.hashes) * self._memory.block_bytes
                seconds = time.perf_counter() - started
                self._news.add_end(KVFetched(job, num_bytes, seconds, MOVER))
            self._open.discard(job)

    def _load_all(self, order: TierOrder) -> None:
        self._blocks.begin(order.fence)
        ids = integers(order.fetch.blocks.data)
        for index, content in enumerate(order.source.hashes):
            if order.fetch.job not in self._open:
                raise TierReadEnded("cancelled", "as the engine asked")
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
            raise TierReadEnded(
                "lost", f"block {content.hex()[:12]} is not in host memory any more"
            )

    def _load_from_disk(self, disk: DiskTier, content: bytes, block: Ids) -> None:
        """By way of host memory, and it stays there, if it may and there is room."""
        place = None if self._host is None else self._host.take()
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
        """Done at the return, so that `place` may hold something else then."""
        self._blocks.put(0, self._blocks.num_rows, block, self._memory.pieces(place))
        self._blocks.settle()
