"""Host tier: places for blocks in host memory, and the index of their contents.

A place stores a block as one run of bytes: its pieces in the order of the cache's rows, as in the
payload of a file (disk.py). A block's `content` is its chained hash.

A place is free, reserved for filling, or published. A published place may be held by readers. If no
place is free, the least recently used published place without readers is reused.

Legend: R rows (see PagedCache.rows), B blocks of the cache, P bytes of a piece.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from worker.device.readback import DeviceEvent, mark
from worker.kv.blocks import Pieces
from worker.kv.tiers.changes import Changes

SLAB_BYTES = 64 << 20
"""Largest size of a slab of memory, unless one block is larger. A slab is allocated when one of its
places is first needed."""


class HostMemory:
    """Memory for `capacity` places, each for a block of a cache with `rows` [R, B, P]. The memory
    is page-locked if the cache is on a device, so that copies to it can run asynchronously."""

    def __init__(self, rows: Tensor, capacity: int) -> None:
        num_rows, _, piece_bytes = rows.shape
        self.capacity = capacity
        self.block_bytes = num_rows * piece_bytes
        self._rows = rows
        self._per_slab = min(max(SLAB_BYTES // self.block_bytes, 1), capacity)
        self._slabs: dict[int, Tensor] = {}

    def pieces(self, place: int) -> Pieces:
        """Return the memory of a place as pieces [R, 1, P], to read or write."""
        return self._place(place).unsqueeze(1).numpy()

    def payload(self, place: int) -> memoryview:
        """Return the memory of a place as bytes [block_bytes], to read or write."""
        return self._place(place).flatten().numpy().data

    def copy_out(self, block: int, place: int) -> None:
        """Copy a block of the cache to a place, after all launched steps and before any later step.
        On a device the copy is queued. On the CPU numpy copies at once, because torch would start
        its threads."""
        into, source = self._place(place), self._rows[:, block]
        if self._rows.device.type == "cpu":
            np.copyto(into.numpy(), source.numpy())
        else:
            into.copy_(source, non_blocking=True)

    def mark(self) -> DeviceEvent:
        """Return an event that is done when all copies queued so far are done."""
        return mark(self._rows.device)

    def _place(self, place: int) -> Tensor:
        """Return the memory of a place, uint8 [R, P]. Allocate its slab if this is the first
        use."""
        number, index = divmod(place, self._per_slab)
        slab = self._slabs.get(number)
        if slab is None:
            count = min(self._per_slab, self.capacity - number * self._per_slab)
            num_rows, _, piece_bytes = self._rows.shape
            shape = (count, num_rows, piece_bytes)
            is_pinned = self._rows.device.type != "cpu"
            slab = torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
            self._slabs[number] = slab
        return slab[index]


class HostTier:
    """Index of `capacity` places, numbered from 0. Freed places are reused first, then places that
    were never used, then published ones. Thread-safe. Each method is O(1), or O(held) if the oldest
    places are held; `drain_changes` is O(changes). The constructor raises ValueError if `capacity`
    is below 1."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a tier must hold at least one block, not {capacity}")
        self.capacity = capacity
        self._lock = Lock()
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free: list[int] = []
        self._num_touched = 0  # places from here on were never used
        self._filling: set[int] = set()
        self._holders: Counter[bytes] = Counter()
        self._changes = Changes()

    def __contains__(self, content: bytes) -> bool:
        return content in self._places

    def __len__(self) -> int:
        return len(self._places)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the contents (added, removed) since the last call."""
        with self._lock:
            return self._changes.drain()

    # ---- filling

    def reserve(self) -> int | None:
        """Reserve a place for filling and return it; None if all places are reserved or held."""
        with self._lock:
            place = self._find_place()
            if place is not None:
                self._filling.add(place)
            return place

    def _find_place(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._num_touched < self.capacity:
            self._num_touched += 1
            return self._num_touched - 1
        evicted = next((content for content in self._places if not self._holders[content]), None)
        if evicted is None:
            return None
        self._changes.remove(evicted)
        return self._places.pop(evicted)

    def publish(self, content: bytes, place: int) -> None:
        """Publish a reserved place with its content. If another place already has that content,
        this one becomes free."""
        with self._lock:
            self._filling.remove(place)
            if content in self._places:
                self._free.append(place)
            else:
                self._places[content] = place
                self._changes.add(content)

    def give_back(self, place: int) -> None:
        """Free a reserved place without publishing it."""
        with self._lock:
            self._filling.remove(place)
            self._free.append(place)

    # ---- reading

    def hold(self, content: bytes) -> int | None:
        """Return the place of `content`, and keep it from being reused until `release`; None if the
        content has no place."""
        with self._lock:
            place = self._places.get(content)
            if place is not None:
                self._holders[content] += 1
            return place

    def release(self, content: bytes) -> None:
        """Undo one `hold` of `content`."""
        with self._lock:
            assert self._holders[content] > 0, "released without a holder"
            self._holders[content] -= 1
            if not self._holders[content]:
                del self._holders[content]

    def touch(self, content: bytes) -> None:
        """Mark the content as used, so that it is evicted last."""
        with self._lock:
            if content in self._places:
                self._places.move_to_end(content)

    def check(self) -> None:
        """Check that every place is free, reserved, or published; for tests."""
        places = sorted([*self._places.values(), *self._free, *self._filling])
        assert places == list(range(self._num_touched)), "a place is lost, or used twice"
        assert self._num_touched <= self.capacity
        assert set(self._holders) <= set(self._places), "a held place was reused"
