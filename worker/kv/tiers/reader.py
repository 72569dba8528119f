"""Loads blocks and states from host memory or disk into the cache, one job after another.

Nothing else uses the blocks and the checkpoint of a job until the job ends
(protocol/worker/kv.py). A failed job leaves them with arbitrary contents and reports a reason; the
engine then computes their K/V instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

import numpy as np

from protocol.worker.kv import (
    KVFailure,
    KVFetch,
    KVFetched,
    TierSource,
    block_hash,
    is_state_key,
    state_key,
)
from worker.device.staging import integers
from worker.kv.blocks import CacheBlocks
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.changes import Counts
from worker.kv.tiers.disk import BlockLost, DamagedBlockFile, DiskTier
from worker.kv.tiers.host import HostTier, Places
from worker.kv.tiers.writer import TierMemories
from worker.kv.transfer.exports import Ids

MOVER = "tier"


class TierReadEnded(Exception):
    """Raised to end a job early. `kind` is one of the values of KVFailure.kind."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class TierOrder:
    """A queued job. Its memories may be written only after `fences` (CacheBlocks.fence)."""

    fetch: KVFetch
    source: TierSource
    fences: list[object]
    deadline: float


class TierReader:
    """Thread that runs the jobs in the order in which they were queued.

    targets    the cache's blocks, and the checkpoints if the model has a recurrent state
    memories   the same, with their places
    host       None: contents are read from disk only, and are not kept in host memory
    scratch    places that `host` does not use, for contents that get no places in `host`
    """

    def __init__(
        self,
        targets: Sequence[CacheBlocks],
        memories: TierMemories,
        host: HostTier | None,
        scratch: Places,
        disk: DiskTier | None,
        counts: Counts,
        reports: ReportQueue,
    ) -> None:
        self._targets = targets
        self._memories = memories
        self._host, self._disk = host, disk
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
        fences = [target.fence() for target in self._targets]
        self._orders.put(TierOrder(fetch, source, fences, deadline))

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
            job = order.fetch.job
            try:
                self._load_all(order)
            except TierReadEnded as error:
                self._reports.add_result(KVFailure(job, error.kind, str(error)))
            else:
                num_bytes = sum(self._memories.of(key).block_bytes for key, _ in _contents(order))
                seconds = time.perf_counter() - started
                self._reports.add_result(KVFetched(job, num_bytes, seconds, MOVER))
            self._open.discard(job)

    def _load_all(self, order: TierOrder) -> None:
        for target, fence in zip(self._targets, order.fences, strict=True):
            target.wait_for(fence)
        for key, number in _contents(order):
            if order.fetch.job not in self._open:
                raise TierReadEnded("cancelled", "cancelled by the engine")
            if time.monotonic() > order.deadline:
                raise TierReadEnded("timeout", f"it took longer than {order.fetch.timeout_s:g} s")
            self._load(key, number)

    def _load(self, key: bytes, number: Ids) -> None:
        """Load a block or a state to the block or checkpoint `number` [1]."""
        if self._host is not None and (places := self._host.hold(key)) is not None:
            self._memories.of(key).put(places, number)
            self._host.release(key)
            self._counts.add("host", "loaded")
        elif self._disk is not None:
            self._load_from_disk(self._disk, key, number)
            self._counts.add("disk", "loaded")
        else:
            self._counts.add("host", "failed")
            raise TierReadEnded("lost", f"{_name(key)} is no longer in host memory")

    def _load_from_disk(self, disk: DiskTier, key: bytes, number: Ids) -> None:
        """Load a content from disk through host memory. Keep it there if there is a host tier with
        places for it."""
        memory, places = self._memories.of(key), None
        if self._host is not None:
            places = self._host.reserve(memory.num_places)
        via = self._scratch[: memory.num_places] if places is None else places
        try:
            disk.load(key, memory.payload(via))
        except (BlockLost, DamagedBlockFile) as error:
            if self._host is not None and places is not None:
                self._host.give_back(places)
            self._counts.add("disk", "failed")
            kind = "lost" if isinstance(error, BlockLost) else "damaged"
            raise TierReadEnded(kind, f"{_name(key)}: {error}") from None
        memory.put(via, number)
        if self._host is not None and places is not None:
            self._host.publish(key, places)


def _contents(order: TierOrder) -> Iterator[tuple[bytes, Ids]]:
    """Yield the key of each block and state of a job, and the number [1] of the block or checkpoint
    that it is loaded to."""
    ids, hashes = integers(order.fetch.blocks.data), order.source.hashes
    for index, content in enumerate(hashes):
        yield content, ids[index : index + 1]
    if order.fetch.checkpoint is not None:
        yield state_key(hashes[-1]), np.array([order.fetch.checkpoint])


def _name(key: bytes) -> str:
    """Return the name of a content in error messages."""
    kind = "the state after block" if is_state_key(key) else "block"
    return f"{kind} {block_hash(key).hex()[:12]}"
