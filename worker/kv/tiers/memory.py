"""Host memory for blocks, divided into numbered places, and the copies into it.

A block here is one run of bytes, its pieces in the order of the cache's rows, exactly as in a
file's payload (block_file.py).

Legend: R rows (see KVCache.rows), B blocks of the cache, P bytes of a piece.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.batch.readback import DeviceEvent, mark
from worker.kv.blocks import Pieces

SLAB_BYTES = 64 << 20
"""Size of the slabs in which memory is allocated, when first needed."""


class HostMemory:
    """`capacity` places for blocks of a cache with `rows` [R, B, P]. Memory is page-locked if the
    cache is on a device, so that copies to it need not be waited for."""

    def __init__(self, rows: Tensor, capacity: int) -> None:
        num_rows, _, piece_bytes = rows.shape
        self.capacity = capacity
        self.block_bytes = num_rows * piece_bytes
        self._rows = rows
        self._per_slab = min(max(SLAB_BYTES // self.block_bytes, 1), capacity)
        self._slabs: dict[int, Tensor] = {}

    def pieces(self, place: int) -> Pieces:
        """Return the place as pieces [R, 1, P], to read or write."""
        return self._place(place).unsqueeze(1).numpy()

    def payload(self, place: int) -> memoryview:
        """Return the same memory as bytes [block_bytes]."""
        return self._place(place).flatten().numpy().data

    def copy_out(self, block: int, place: int) -> None:
        """Copy a block, after all launched steps and before any later one. On a device the copy is
        queued. On the CPU numpy copies at once, because torch would start its threads."""
        into, source = self._place(place), self._rows[:, block]
        if self._rows.device.type == "cpu":
            np.copyto(into.numpy(), source.numpy())
        else:
            into.copy_(source, non_blocking=True)

    def mark(self) -> DeviceEvent:
        """Return an event that is done after all copies queued so far."""
        return mark(self._rows.device)

    def _place(self, place: int) -> Tensor:
        """[R, P] uint8."""
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
