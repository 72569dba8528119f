"""Host memory for blocks, in places that are numbered, and the copies into it.

A block is one run of bytes here, as a file's payload is (block_file.py): its pieces in the order of
the cache's rows.

Legend: R rows (see KVCache.rows), B blocks of the cache, P bytes of a piece.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.batch.readback import DeviceEvent, mark
from worker.kv.blocks import Pieces

SLAB_BYTES = 64 << 20
"""Memory is taken from the system in slabs of about so much, when first needed."""


class HostMemory:
    """`capacity` places for blocks of a cache whose `rows` are [R, B, P]. Page-locked where that is
    on a device, so that a copy out of it need not be waited for."""

    def __init__(self, rows: Tensor, capacity: int) -> None:
        num_rows, _, piece_bytes = rows.shape
        self.capacity = capacity
        self.block_bytes = num_rows * piece_bytes
        self._rows = rows
        self._per_slab = min(max(SLAB_BYTES // self.block_bytes, 1), capacity)
        self._slabs: dict[int, Tensor] = {}

    def pieces(self, place: int) -> Pieces:
        """[R, 1, P], to be read or written."""
        return self._place(place).unsqueeze(1).numpy()

    def payload(self, place: int) -> memoryview:
        """[block_bytes], the same memory."""
        return self._place(place).flatten().numpy().data

    def copy_out(self, block: int, place: int) -> None:
        """Behind all steps that were launched, before any that will be: on a device the copy is
        queued, on the CPU it is done. By numpy there: torch would put a team of threads to it."""
        into, source = self._place(place), self._rows[:, block]
        if self._rows.device.type == "cpu":
            np.copyto(into.numpy(), source.numpy())
        else:
            into.copy_(source, non_blocking=True)

    def mark(self) -> DeviceEvent:
        """Over when all copies that were queued until now are done."""
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
