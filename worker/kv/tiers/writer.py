"""Stores blocks in the tiers: copies them out of the cache at once, and writes them to disk later.

The loop calls `store` between two plans, so the blocks are copied before a later plan can change
them: on a device the copies are queued before the later plan's work, and on the CPU they are done
when `store` returns. A thread publishes the copies and writes them to disk. If host memory is full
of blocks that wait to be written, further blocks are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from worker.device.readback import DeviceEvent
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.changes import Counts, Tier
from worker.kv.tiers.disk import SCAN_S, DiskTier
from worker.kv.tiers.host import HostMemory, HostTier

CLOSE_S = 3.0
"""Time limit for writing the waiting blocks at shutdown."""
UNWRITTEN_BYTES = 256 << 20
MIN_UNWRITTEN = 8
"""Limit of the blocks that may wait to be written to disk: UNWRITTEN_BYTES in total, but at least
MIN_UNWRITTEN blocks."""
REPORT_EVERY = 32
"""A report is requested about every REPORT_EVERY written blocks, and when no block waits."""


def max_unwritten(block_bytes: int) -> int:
    """Return the most blocks that may wait to be written to disk."""
    return max(UNWRITTEN_BYTES // block_bytes, MIN_UNWRITTEN)


@dataclass(frozen=True, slots=True)
class TierBatch:
    """Blocks to publish and write, as (content, place) pairs. A place has its block's bytes after
    the event `copied`. The place is None if the host tier has the content already."""

    copied: DeviceEvent
    blocks: list[tuple[bytes, int | None]]


@dataclass(frozen=True, slots=True)
class UsedContents:
    """Contents to mark as used, the latest last."""

    contents: Sequence[bytes]


class TierWriter:
    """Thread that publishes stored blocks and writes them to disk.

    host, memory   the places in which every block is stored first
    disk           None: blocks stay in host memory
    tiers          the tiers for which a dropped block is counted
    """

    def __init__(
        self,
        host: HostTier,
        memory: HostMemory,
        disk: DiskTier | None,
        counts: Counts,
        tiers: Sequence[Tier],
        reports: ReportQueue,
    ) -> None:
        self._host, self._memory, self._disk = host, memory, disk
        self._counts = counts
        self._tiers = tiers
        self._reports = reports
        self._arrived: SimpleQueue[TierBatch | UsedContents | None] = SimpleQueue()
        self._unwritten: deque[tuple[bytes, int]] = deque()  # their places are held
        self._max_unwritten = max_unwritten(memory.block_bytes)
        self._close_at: float | None = None
        self._thread = Thread(target=reports.guard(self._run), name="kv tier writer", daemon=True)
        self._thread.start()

    # ---- called by the loop

    def store(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Store blocks of one sequence, in its order. If there is no place for a block, it and all
        later blocks are dropped, because the later ones are useless without it."""
        stored: list[tuple[bytes, int | None]] = []
        for index, (block, content) in enumerate(zip(blocks, contents, strict=True)):
            place = None
            if content not in self._host:
                if (place := self._host.reserve()) is None:
                    for tier in self._tiers:
                        self._counts.add(tier, "dropped", len(blocks) - index)
                    break
                self._memory.copy_out(block, place)
            stored.append((content, place))
        self._arrived.put(TierBatch(self._memory.mark(), stored))

    def touch(self, contents: Sequence[bytes]) -> None:
        """Mark contents as used, the latest last, so that the tiers evict other contents first."""
        self._arrived.put(UsedContents(contents))

    def close(self) -> None:
        self._arrived.put(None)
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        while not self._is_over():
            self._receive()
            if self._unwritten:
                self._write(*self._unwritten.popleft())
            if self._disk is not None and self._close_at is None:
                self._disk.scan_if_due()
            if len(self._unwritten) % REPORT_EVERY == 0:
                self._reports.wake()

    def _is_over(self) -> bool:
        if self._close_at is None:
            return False
        return not self._unwritten or time.monotonic() > self._close_at

    def _receive(self) -> None:
        """Apply every item that has arrived. Wait for an item only if no block is left to write."""
        is_idle = not self._unwritten and self._close_at is None
        try:
            while True:
                self._apply(self._arrived.get(block=is_idle, timeout=SCAN_S))
                is_idle = False
        except Empty:
            pass

    def _apply(self, item: TierBatch | UsedContents | None) -> None:
        match item:
            case TierBatch():
                item.copied.synchronize()
                for content, place in item.blocks:
                    if place is not None:
                        self._host.publish(content, place)
                        self._counts.add("host", "stored")
                    self._queue_write(content)
            case UsedContents(contents=contents):
                for content in contents:
                    self._host.touch(content)
                    if self._disk is not None:
                        self._disk.touch(content)
            case None:
                self._close_at = time.monotonic() + CLOSE_S

    def _queue_write(self, content: bytes) -> None:
        if self._disk is None or content in self._disk:
            return
        has_space = len(self._unwritten) < self._max_unwritten
        place = self._host.hold(content) if has_space else None
        if place is None:
            self._counts.add("disk", "dropped")
        else:
            self._unwritten.append((content, place))

    def _write(self, content: bytes, place: int) -> None:
        assert self._disk is not None
        if content not in self._disk:  # it may have been queued twice
            is_stored = self._disk.store(content, self._memory.payload(place))
            self._counts.add("disk", "stored" if is_stored else "dropped")
        self._host.release(content)
