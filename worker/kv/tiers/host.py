"""Host tier: places for blocks and states in host memory, and the index of their contents.

A place stores a block as one run of bytes: its pieces in the order of the cache's rows, as in the
payload of a file (disk.py). A state is a run of bytes, too, which is cut into parts that fit into
places. So a content, which is a block or a state, has one place or several. It is known by its
`key` (protocol/worker/kv.py).

A place is free, reserved for filling, or published. Published places may be held by readers. If too
few places are free, the least recently used contents without readers are dropped.

Legend: R rows (see PagedCache.rows), B blocks of the cache, P bytes of a piece.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from worker.device.readback import DeviceEvent, mark
from worker.kv.blocks import WHOLE, WORD_BYTES, CacheBlocks
from worker.kv.tiers.changes import Changes
from worker.kv.transfer.exports import Ids

SLAB_BYTES = 64 << 20
"""Largest size of a slab of memory, unless one place is larger. A slab is allocated when one of its
places is first needed."""

Places = tuple[int, ...]


class HostMemory:
    """Memory for `capacity` places of `place_bytes` bytes each. The memory is page-locked if the
    cache is on a device, so that copies to it can run asynchronously."""

    def __init__(self, place_bytes: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.place_bytes = place_bytes
        self._device = device
        self._per_slab = min(max(SLAB_BYTES // place_bytes, 1), capacity)
        self._slabs: dict[int, Tensor] = {}

    def place(self, place: int) -> Tensor:
        """Return the memory of a place, uint8 [place_bytes]. Allocate its slab if this is the first
        use."""
        number, index = divmod(place, self._per_slab)
        slab = self._slabs.get(number)
        if slab is None:
            count = min(self._per_slab, self.capacity - number * self._per_slab)
            shape, is_pinned = (count, self.place_bytes), self._device.type != "cpu"
            slab = torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
            self._slabs[number] = slab
        return slab[index]

    def mark(self) -> DeviceEvent:
        """Return an event that is done when all copies queued so far are done."""
        return mark(self._device)


class PlacedMemory:
    """Memory whose blocks are copied to places and back: the K/V cache, or the checkpoints.

    rows        uint8 [R, B, P]; R is 1 unless a block fits into a place
    blocks      the same, for copies back
    num_places  number of places that a block takes
    """

    def __init__(self, rows: Tensor, blocks: CacheBlocks, memory: HostMemory) -> None:
        self._rows, self._blocks, self._memory = rows, blocks, memory
        self._parts = _parts(blocks, memory.place_bytes)
        self.num_places = len(self._parts)
        self.block_bytes = blocks.block_bytes

    def copy_out(self, block: int, places: Places) -> None:
        """Copy a block to places, after all launched steps and before any later step. On a device
        the copies are queued. On the CPU numpy copies at once, because torch would start its
        threads."""
        for part, into in self._placed(places):
            source = self._rows[:, block, part]
            if self._rows.device.type == "cpu":
                np.copyto(into.numpy(), source.numpy())
            else:
                into.copy_(source, non_blocking=True)

    def put(self, places: Places, block: Ids) -> None:
        """Copy places to a block [1]. Wait for the copy, so that the places may be reused."""
        for part, source in self._placed(places):
            self._blocks.put(0, self._blocks.num_rows, block, source.unsqueeze(1).numpy(), part)
        self._blocks.synchronize()

    def payload(self, places: Places) -> list[memoryview]:
        """Return the memory of a block's places as bytes, to read or write."""
        return [part.flatten().numpy().data for _, part in self._placed(places)]

    def _placed(self, places: Places) -> Iterator[tuple[slice, Tensor]]:
        """Yield each part of a piece, and its memory [R, bytes of the part]."""
        num_rows = self._blocks.num_rows
        for part, place in zip(self._parts, places, strict=True):
            num_bytes = len(range(*part.indices(self._blocks.piece_bytes)))
            memory = self._memory.place(place)[: num_rows * num_bytes]
            yield part, memory.view(num_rows, num_bytes)


def num_parts(blocks: CacheBlocks, place_bytes: int) -> int:
    """Return how many places of this size a block takes."""
    return len(_parts(blocks, place_bytes))


def _parts(blocks: CacheBlocks, place_bytes: int) -> list[slice]:
    """Return the parts of a piece that are stored in a place each, in all rows."""
    if blocks.block_bytes <= place_bytes:
        return [WHOLE]
    assert blocks.num_rows == 1, "only a state is larger than a place"
    size = max(place_bytes // WORD_BYTES, 1) * WORD_BYTES
    starts = range(0, blocks.piece_bytes, size)
    return [slice(start, min(start + size, blocks.piece_bytes)) for start in starts]


class HostTier:
    """Index of `capacity` places, numbered from 0. Freed places are reused first, then places that
    were never used, then published ones. Thread-safe. Each method is O(places of a content), or
    O(held) if the oldest contents are held; `drain_changes` is O(changes). The constructor raises
    ValueError if `capacity` is below 1."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a tier must hold at least one block, not {capacity}")
        self.capacity = capacity
        self._lock = Lock()
        self._places: OrderedDict[bytes, Places] = OrderedDict()  # least recently used first
        self._free: list[int] = []
        self._num_touched = 0  # places from here on were never used
        self._num_published = 0
        self._filling: set[int] = set()
        self._holders: Counter[bytes] = Counter()
        self._changes = Changes()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    @property
    def num_published(self) -> int:
        """Return the number of places that have a content."""
        return self._num_published

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys (added, removed) since the last call."""
        with self._lock:
            return self._changes.drain()

    # ---- filling

    def reserve(self, count: int) -> Places | None:
        """Reserve `count` places for filling and return them; None, and nothing is dropped, if too
        few places are neither reserved nor held."""
        with self._lock:
            if not self._free_places(count):
                return None
            places = tuple(self._take_free() for _ in range(count))
            self._filling.update(places)
            return places

    def _free_places(self, count: int) -> bool:
        """Drop the least recently used contents until `count` places are free. Return False, and
        drop nothing, if that is not possible."""
        num_free = len(self._free) + self.capacity - self._num_touched
        dropped: list[bytes] = []
        for key, places in self._places.items():
            if num_free >= count:
                break
            if not self._holders[key]:
                dropped.append(key)
                num_free += len(places)
        if num_free < count:
            return False
        for key in dropped:
            self._changes.remove(key)
            places = self._places.pop(key)
            self._num_published -= len(places)
            self._free += places
        return True

    def _take_free(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1

    def publish(self, key: bytes, places: Places) -> None:
        """Publish reserved places with their content. If others already have that content, these
        become free."""
        with self._lock:
            self._filling.difference_update(places)
            if key in self._places:
                self._free += places
            else:
                self._places[key] = places
                self._num_published += len(places)
                self._changes.add(key)

    def give_back(self, places: Places) -> None:
        """Free reserved places without publishing them."""
        with self._lock:
            self._filling.difference_update(places)
            self._free += places

    # ---- reading

    def hold(self, key: bytes) -> Places | None:
        """Return the places of a content, and keep them from being reused until `release`; None if
        the content has none."""
        with self._lock:
            places = self._places.get(key)
            if places is not None:
                self._holders[key] += 1
            return places

    def release(self, key: bytes) -> None:
        """Undo one `hold` of a content."""
        with self._lock:
            assert self._holders[key] > 0, "released without a holder"
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]

    def touch(self, key: bytes) -> None:
        """Mark the content as used, so that it is dropped last."""
        with self._lock:
            if key in self._places:
                self._places.move_to_end(key)

    def check(self) -> None:
        """Check that every place is free, reserved, or published; for tests."""
        published = [place for places in self._places.values() for place in places]
        assert len(published) == self._num_published
        places = sorted([*published, *self._free, *self._filling])
        assert places == list(range(self._num_touched)), "a place is lost, or used twice"
        assert self._num_touched <= self.capacity
        assert set(self._holders) <= set(self._places), "a held place was reused"
