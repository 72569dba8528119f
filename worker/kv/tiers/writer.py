"""Storing: blocks are copied out of the cache at once, and written to disk when there is time.

The loop calls `keep` between two plans, so no later plan has touched the blocks: on a device their
copies are queued before its work, on the CPU they are done. All else happens in a thread. When the
pool of host memory is full of blocks that wait to be written, no more are kept: best effort.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from worker.batch.readback import DeviceEvent
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.counts import Counts, Tier
from worker.kv.tiers.disk import LOOK_S, DiskTier
from worker.kv.tiers.host import HostTier
from worker.kv.tiers.memory import HostMemory

CLOSE_S = 3.0
"""At the end, what waits to be written is written as far as it can be in this time."""
UNWRITTEN_BYTES = 256 << 20
LEAST_UNWRITTEN = 8
"""So much memory, but at least so many blocks, may be on the way to the disk."""
TELL_EVERY = 32
"""What is written is told after so many blocks, and when all are."""


def most_unwritten(block_bytes: int) -> int:
    """How many blocks may wait to be written."""
    return max(UNWRITTEN_BYTES // block_bytes, LEAST_UNWRITTEN)


@dataclass(frozen=True, slots=True)
class TierBatch:
    """(content, the place that holds it once `copied` is done; None: it is findable already)."""

    copied: DeviceEvent
    blocks: list[tuple[bytes, int | None]]


@dataclass(frozen=True, slots=True)
class Used:
    """These were used, the last one last."""

    contents: Sequence[bytes]


class TierWriter:
    """host, memory   what is kept comes here first; `host.capacity` places
    disk           None: what is kept stays there
    tiers          which ones are missing what is not kept
    """

    def __init__(
        self,
        host: HostTier,
        memory: HostMemory,
        disk: DiskTier | None,
        counts: Counts,
        tiers: Sequence[Tier],
        news: ReportQueue,
    ) -> None:
        self._host, self._memory, self._disk = host, memory, disk
        self._counts = counts
        self._tiers = tiers
        self._news = news
        self._arrived: SimpleQueue[TierBatch | Used | None] = SimpleQueue()
        self._unwritten: deque[tuple[bytes, int]] = deque()  # their places are held
        self._most_unwritten = most_unwritten(memory.block_bytes)
        self._close_at: float | None = None
        self._thread = Thread(target=news.guard(self._run), name="kv keeper", daemon=True)
        self._thread.start()

    # ---- by the loop

    def keep(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Blocks of a sequence, in its order: behind one that is not kept none is of use."""
        kept: list[tuple[bytes, int | None]] = []
        for index, (block, content) in enumerate(zip(blocks, contents, strict=True)):
            place = None
            if content not in self._host:
                if (place := self._host.take()) is None:
                    for tier in self._tiers:
                        self._counts.add(tier, "dropped", len(blocks) - index)
                    break
                self._memory.copy_out(block, place)
            kept.append((content, place))
        self._arrived.put(TierBatch(self._memory.mark(), kept))

    def use(self, contents: Sequence[bytes]) -> None:
        """These were used, the last one last: others go first."""
        self._arrived.put(Used(contents))

    def close(self) -> None:
        self._arrived.put(None)
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        while not self._is_over():
            self._hear()
            if self._unwritten:
                self._write(*self._unwritten.popleft())
            if self._disk is not None and self._close_at is None:
                self._disk.look_if_due()
            if len(self._unwritten) % TELL_EVERY == 0:
                self._news.wake()

    def _is_over(self) -> bool:
        if self._close_at is None:
            return False
        return not self._unwritten or time.monotonic() > self._close_at

    def _hear(self) -> None:
        """All that has arrived; waits only where there is nothing to be written."""
        is_idle = not self._unwritten and self._close_at is None
        try:
            while True:
                self._take_in(self._arrived.get(block=is_idle, timeout=LOOK_S))
                is_idle = False
        except Empty:
            pass

    def _take_in(self, news: TierBatch | Used | None) -> None:
        match news:
            case TierBatch():
                news.copied.synchronize()
                for content, place in news.blocks:
                    if place is not None:
                        self._host.publish(content, place)
                        self._counts.add("host", "stored")
                    self._await_writing(content)
            case Used(contents=contents):
                for content in contents:
                    self._host.touch(content)
                    if self._disk is not None:
                        self._disk.touch(content)
            case None:
                self._close_at = time.monotonic() + CLOSE_S

    def _await_writing(self, content: bytes) -> None:
        if self._disk is None or content in self._disk:
            return
        is_room = len(self._unwritten) < self._most_unwritten
        place = self._host.hold(content) if is_room else None
        if place is None:
            self._counts.add("disk", "dropped")
        else:
            self._unwritten.append((content, place))

    def _write(self, content: bytes, place: int) -> None:
        assert self._disk is not None
        if content not in self._disk:  # it may have waited twice
            is_stored = self._disk.store(content, self._memory.payload(place))
            self._counts.add("disk", "stored" if is_stored else "dropped")
        self._host.release(content)
