"""The cache's blocks as bytes, in host memory or on a device, for transfers and tiers.

Checkpoints of recurrent states are the blocks of another memory (checkpoint_memory.py).

This code runs in threads beside the steps. To disturb the steps little, it makes few calls, each on
large memory. The calls release the GIL while they copy, and none of them starts torch's own
threads.

Legend: R rows (see PagedCache.rows), B blocks of the cache, N blocks to copy, P bytes of a piece.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.device.staging import upload, upload_bytes
from worker.kv.cache import PagedCache
from worker.kv.transfer.exports import Ids

Pieces = NDArray[np.uint8]
"""[some rows, N, P]: the pieces of N blocks in some of the R rows, or a part of the bytes of each.
C-contiguous if they come from `gather`."""
WHOLE = slice(None)
"""The part of a piece that is all of it."""
WORD_BYTES = 8
"""Parts of pieces begin at a multiple of this, because a device copies words of this size, which is
faster than single bytes."""


class CacheBlocks(Protocol):
    """Interface to the bytes of one cache.

    num_rows      R: rows of the cache
    num_blocks    B: blocks of the cache
    piece_bytes   P: bytes of a block in one row
    block_bytes   bytes of a block in all rows
    """

    num_rows: int
    num_blocks: int
    piece_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_rows * self.piece_bytes

    def fence(self) -> object:
        """Return a fence that marks the end of all steps launched so far. Call it in the loop's
        thread."""
        ...

    def wait_for(self, fence: object) -> None:
        """Make all later `put`s and `copy`s happen after the steps whose end the fence marks."""
        ...

    def gather(self, first_row: int, end_row: int, ids: Ids, part: slice = WHOLE) -> Pieces:
        """Return the pieces in rows [first_row, end_row) of the blocks `ids`, copied to host
        memory: the bytes `part` of each."""
        ...

    def put(
        self, first_row: int, end_row: int, ids: Ids, pieces: Pieces, part: slice = WHOLE
    ) -> None:
        """Write the pieces into rows [first_row, end_row) of the blocks `ids`: into the bytes
        `part` of each."""
        ...

    def copy(self, ids: Ids, source: Pieces, theirs: Ids, part: slice = WHOLE) -> None:
        """Copy the blocks `theirs` of another cache, which is mapped as `source`, to the blocks
        `ids` of this one: in all rows, the bytes `part` of each piece."""
        ...

    def synchronize(self) -> None:
        """Wait until all `put`s and `copy`s are done."""
        ...


def cache_blocks(cache: PagedCache) -> CacheBlocks:
    return memory_blocks(cache.rows)


def memory_blocks(rows: Tensor) -> CacheBlocks:
    """Return the blocks of a memory, rows uint8 [R, B, P]."""
    return HostBlocks(rows.numpy()) if rows.device.type == "cpu" else DeviceBlocks(rows)


class HostBlocks(CacheBlocks):
    """The blocks of a cache in host memory, rows [R, B, P]. Its methods read and write the cache
    directly."""

    def __init__(self, rows: Pieces) -> None:
        self.num_rows, self.num_blocks, self.piece_bytes = rows.shape
        self._rows = rows

    def fence(self) -> object:
        """Return None. On the CPU a step is done when its launch returns, so there is nothing to
        wait for."""
        return None

    def wait_for(self, fence: object) -> None:
        pass

    def gather(self, first_row: int, end_row: int, ids: Ids, part: slice = WHOLE) -> Pieces:
        if part != WHOLE:
            return np.ascontiguousarray(self._rows[first_row:end_row, ids, part])
        # Any mode except "clip" copies twice. The ids were checked when they were exported.
        out = np.empty((end_row - first_row, len(ids), self.piece_bytes), np.uint8)
        return np.take(self._rows[first_row:end_row], ids, axis=1, out=out, mode="clip")

    def put(
        self, first_row: int, end_row: int, ids: Ids, pieces: Pieces, part: slice = WHOLE
    ) -> None:
        self._rows[first_row:end_row, ids, part] = pieces

    def copy(self, ids: Ids, source: Pieces, theirs: Ids, part: slice = WHOLE) -> None:
        """Copy blocks; a run of blocks that is consecutive in both caches is copied in one call."""
        steps = (np.diff(ids) != 1) | (np.diff(theirs) != 1)
        starts = [0, *(np.flatnonzero(steps) + 1).tolist(), len(ids)]
        for start, end in pairwise(starts):
            ours, other, count = int(ids[start]), int(theirs[start]), end - start
            into = self._rows[:, ours : ours + count, part]
            np.copyto(into, source[:, other : other + count, part])

    def synchronize(self) -> None:
        pass


class DeviceBlocks(CacheBlocks):
    """The blocks of a cache on a device, rows uint8 [R, B, P]. Copies use pinned memory and their
    own stream, beside the stream of the steps. torch's allocator reuses pinned memory only after
    its copies are done."""

    def __init__(self, rows: Tensor) -> None:
        self.num_rows, self.num_blocks, self.piece_bytes = rows.shape
        self._dtype = torch.uint8 if self.piece_bytes % WORD_BYTES else torch.int64
        self._rows = rows.view(self._dtype)
        self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._rows.device).record_event()
        return event

    def wait_for(self, fence: object) -> None:
        assert isinstance(fence, torch.cuda.Event)
        self._stream.wait_event(fence)

    def gather(self, first_row: int, end_row: int, ids: Ids, part: slice = WHOLE) -> Pieces:
        with torch.cuda.stream(self._stream):
            (wanted,) = upload([ids], self._rows.device)
            found = self._part(first_row, end_row, part).index_select(1, wanted)
            host = torch.empty(found.shape, dtype=self._dtype, pin_memory=True)
            host.copy_(found, non_blocking=True)
        self._stream.synchronize()
        return host.numpy().view(np.uint8)

    def put(
        self, first_row: int, end_row: int, ids: Ids, pieces: Pieces, part: slice = WHOLE
    ) -> None:
        device = self._rows.device
        with torch.cuda.stream(self._stream):
            (ours,) = upload([ids], device)
            staged = upload_bytes(np.ascontiguousarray(pieces), device).view(self._dtype)
            rows = self._part(first_row, end_row, part)
            rows.index_copy_(1, ours, staged.view(len(rows), len(ids), -1))

    def copy(self, ids: Ids, source: Pieces, theirs: Ids, part: slice = WHOLE) -> None:
        pieces = np.take(source, theirs, axis=1) if part == WHOLE else source[:, theirs, part]
        self.put(0, self.num_rows, ids, pieces, part)

    def _part(self, first_row: int, end_row: int, part: slice) -> Tensor:
        """Return the bytes `part` of all pieces in some rows, as words."""
        rows = self._rows[first_row:end_row]
        if part == WHOLE:
            return rows
        size = self._dtype.itemsize
        return rows[:, :, part.start // size : part.stop // size]

    def synchronize(self) -> None:
        self._stream.synchronize()
