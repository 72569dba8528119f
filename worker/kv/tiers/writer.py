"""Stores blocks and states in the tiers: copies them at once, and writes them to disk later.

The loop calls `store` between two plans, so the blocks and checkpoints are copied before a later
plan can change them: on a device the copies are queued before the later plan's work, and on the CPU
they are done when `store` returns. A thread publishes the copies and writes them to disk. If host
memory is full of contents that wait to be written, further ones are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from protocol.worker.kv import KVStore, is_state_key
from worker.device.readback import DeviceEvent
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.changes import Counts, Tier
from worker.kv.tiers.disk import SCAN_S, DiskTier
from worker.kv.tiers.host import HostMemory, HostTier, PlacedMemory, Places

CLOSE_S = 3.0
"""Time limit for writing the waiting blocks at shutdown."""
UNWRITTEN_BYTES = 256 << 20
MIN_UNWRITTEN = 8
MIN_UNWRITTEN_STATES = 2
"""Limit of what may wait to be written to disk: UNWRITTEN_BYTES in total, but at least
MIN_UNWRITTEN blocks and MIN_UNWRITTEN_STATES states."""
REPORT_EVERY = 32
"""A report is requested about every REPORT_EVERY written blocks, and when no block waits."""


def max_unwritten(place_bytes: int, num_state_places: int) -> int:
    """Return the most places whose content may wait to be written to disk. A state takes
    `num_state_places`; 0: the model has none."""
    least = MIN_UNWRITTEN + MIN_UNWRITTEN_STATES * num_state_places
    return max(UNWRITTEN_BYTES // place_bytes, least)


@dataclass(frozen=True, slots=True)
class TierMemories:
    """The memories whose blocks are stored. `states` are the checkpoints; None: the model has no
    recurrent state."""

    cache: PlacedMemory
    states: PlacedMemory | None

    def of(self, key: bytes) -> PlacedMemory:
        """Return the memory of the block or state with this key."""
        if not is_state_key(key):
            return self.cache
        assert self.states is not None, "the model has no states"
        return self.states

    @property
    def num_state_places(self) -> int:
        return 0 if self.states is None else self.states.num_places


@dataclass(frozen=True, slots=True)
class TierBatch:
    """Blocks and states to publish and write, as (key, places) pairs. Places have their content
    after the event `copied`. They are None if the host tier has the content already."""

    copied: DeviceEvent
    contents: list[tuple[bytes, Places | None]]


@dataclass(frozen=True, slots=True)
class UsedContents:
    """Keys of contents to mark as used, the latest last."""

    keys: Sequence[bytes]


class TierWriter:
    """Thread that publishes stored blocks and states and writes them to disk.

    host, memory   the places in which every content is stored first
    memories       where contents come from
    disk           None: contents stay in host memory
    tiers          the tiers for which a dropped content is counted
    """

    def __init__(
        self,
        host: HostTier,
        memory: HostMemory,
        memories: TierMemories,
        disk: DiskTier | None,
        counts: Counts,
        tiers: Sequence[Tier],
        reports: ReportQueue,
    ) -> None:
        self._host, self._memory, self._memories, self._disk = host, memory, memories, disk
        self._counts = counts
        self._tiers = tiers
        self._reports = reports
        self._arrived: SimpleQueue[TierBatch | UsedContents | None] = SimpleQueue()
        self._unwritten: deque[tuple[bytes, Places]] = deque()  # their places are held
        self._num_unwritten = 0  # number of these places
        self._max_unwritten = max_unwritten(memory.place_bytes, memories.num_state_places)
        self._close_at: float | None = None
        self._thread = Thread(target=reports.guard(self._run), name="kv tier writer", daemon=True)
        self._thread.start()

    # ---- called by the loop

    def store(self, message: KVStore) -> None:
        """Store blocks and states of one sequence, in its order. If there is no place for a block,
        it and all later blocks are dropped, because the later ones are useless without it. Raises
        ValueError if there is a state, but the model has none."""
        if message.states and self._memories.states is None:
            raise ValueError("a state is to be stored, but the model has none")
        stored = self._store_all(message.blocks.tolist(), message.hashes)
        if message.checkpoints is not None:
            stored += self._store_all(message.checkpoints.tolist(), message.states)
        self._arrived.put(TierBatch(self._memory.mark(), stored))

    def _store_all(
        self, numbers: Sequence[int], keys: Sequence[bytes]
    ) -> list[tuple[bytes, Places | None]]:
        """Copy contents of one memory to places. Return the keys and places of those for which
        there are places, up to the first one without."""
        stored: list[tuple[bytes, Places | None]] = []
        for index, (number, key) in enumerate(zip(numbers, keys, strict=True)):
            places, memory = None, self._memories.of(key)
            if key not in self._host:
                if (places := self._host.reserve(memory.num_places)) is None:
                    for tier in self._tiers:
                        self._counts.add(tier, "dropped", len(numbers) - index)
                    break
                memory.copy_out(number, places)
            stored.append((key, places))
        return stored

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark contents as used, the latest last, so that the tiers evict other contents first."""
        self._arrived.put(UsedContents(keys))

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
        """Apply every item that has arrived. Wait for an item only if nothing is left to write."""
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
                for key, places in item.contents:
                    if places is not None:
                        self._host.publish(key, places)
                        self._counts.add("host", "stored")
                    self._queue_write(key)
            case UsedContents(keys=keys):
                for key in keys:
                    self._host.touch(key)
                    if self._disk is not None:
                        self._disk.touch(key)
            case None:
                self._close_at = time.monotonic() + CLOSE_S

    def _queue_write(self, key: bytes) -> None:
        if self._disk is None or key in self._disk:
            return
        count = self._memories.of(key).num_places
        has_space = self._num_unwritten + count <= self._max_unwritten
        places = self._host.hold(key) if has_space else None
        if places is None:
            self._counts.add("disk", "dropped")
        else:
            self._unwritten.append((key, places))
            self._num_unwritten += count

    def _write(self, key: bytes, places: Places) -> None:
        assert self._disk is not None
        if key not in self._disk:  # it may have been queued twice
            is_stored = self._disk.store(key, self._memories.of(key).payload(places))
            self._counts.add("disk", "stored" if is_stored else "dropped")
        self._num_unwritten -= len(places)
        self._host.release(key)
