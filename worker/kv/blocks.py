"""The cache's blocks as bytes, for transfers and tiers, in host memory or on a device.

This code runs in threads beside the steps. So it makes few calls on large memory, each of which
releases the GIL while it copies, and none that starts torch's own threads.

Legend: R rows (see KVCache.rows), B blocks of the cache, N blocks to copy, P bytes of a piece.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kv.cache import KVCache
from worker.kv.transfer.exports import Ids
from worker.slots.staging import upload, upload_bytes

Pieces = NDArray[np.uint8]
"""[R', N, P], some rows of some blocks; C-contiguous if it was gathered."""


class CacheBlocks(Protocol):
    """num_rows, num_blocks, piece_bytes: R, B, P."""

    num_rows: int
    num_blocks: int
    piece_bytes: int

    def fence(self) -> object:
        """Return a fence after all steps launched so far. Call it in the loop's thread."""
        ...

    def wait_for(self, fence: object) -> None:
        """Order all later `put`s after the fence."""
        ...

    def gather(self, first_row: int, end_row: int, ids: Ids) -> Pieces:
        """Copy pieces to host memory."""
        ...

    def put(self, first_row: int, end_row: int, ids: Ids, pieces: Pieces) -> None: ...

    def copy(self, ids: Ids, source: Pieces, theirs: Ids) -> None:
        """Copy whole blocks `theirs` from another cache, which is mapped here, to `ids`."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was put is in place."""
        ...


def blocks_of(cache: KVCache) -> CacheBlocks:
    rows = cache.rows
    return HostBlocks(rows.numpy()) if rows.device.type == "cpu" else DeviceBlocks(rows)


class HostBlocks:
    """The blocks of a cache in host memory, rows [R, B, P]. Reads and writes the cache directly."""

    def __init__(self, rows: Pieces) -> None:
        self.num_rows, self.num_blocks, self.piece_bytes = rows.shape
        self._rows = rows

    def fence(self) -> object:
        """Steps on the CPU are done after their launch, so there is nothing to wait for."""
        return None

    def wait_for(self, fence: object) -> None:
        pass

    def gather(self, first_row: int, end_row: int, ids: Ids) -> Pieces:
        # Any mode but "clip" copies twice; the ids were checked when they were exported.
        out = np.empty((end_row - first_row, len(ids), self.piece_bytes), np.uint8)
        return np.take(self._rows[first_row:end_row], ids, axis=1, out=out, mode="clip")

    def put(self, first_row: int, end_row: int, ids: Ids, pieces: Pieces) -> None:
        self._rows[first_row:end_row, ids] = pieces

    def copy(self, ids: Ids, source: Pieces, theirs: Ids) -> None:
        """Copy runs of blocks that are consecutive in both caches in one call."""
        steps = (np.diff(ids) != 1) | (np.diff(theirs) != 1)
        starts = [0, *(np.flatnonzero(steps) + 1).tolist(), len(ids)]
        for start, end in pairwise(starts):
            ours, other, count = int(ids[start]), int(theirs[start]), end - start
            np.copyto(self._rows[:, ours : ours + count], source[:, other : other + count])

    def synchronize(self) -> None:
        pass


class DeviceBlocks:
    """The cache on a device, rows uint8 [R, B, P]. Copies go through pinned memory on a stream
    beside the steps' stream. torch's allocator reuses pinned memory after its copies are done."""

    def __init__(self, rows: Tensor) -> None:
        self.num_rows, self.num_blocks, self.piece_bytes = rows.shape
        self._rows = rows
        self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._rows.device).record_event()
        return event

    def wait_for(self, fence: object) -> None:
        assert isinstance(fence, torch.cuda.Event)
        self._stream.wait_event(fence)

    def gather(self, first_row: int, end_row: int, ids: Ids) -> Pieces:
        with torch.cuda.stream(self._stream):
            (wanted,) = upload([ids], self._rows.device)
            found = self._rows[first_row:end_row].index_select(1, wanted)
            host = torch.empty(found.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(found, non_blocking=True)
        self._stream.synchronize()
        return host.numpy()

    def put(self, first_row: int, end_row: int, ids: Ids, pieces: Pieces) -> None:
        device = self._rows.device
        with torch.cuda.stream(self._stream):
            (ours,) = upload([ids], device)
            staged = upload_bytes(np.ascontiguousarray(pieces), device).view(pieces.shape)
            self._rows[first_row:end_row].index_copy_(1, ours, staged)

    def copy(self, ids: Ids, source: Pieces, theirs: Ids) -> None:
        self.put(0, self.num_rows, ids, np.take(source, theirs, axis=1))

    def synchronize(self) -> None:
        self._stream.synchronize()
