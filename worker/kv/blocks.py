"""A cache's blocks as bytes, for those who move them: in host memory, or on a device.

Everything here runs in a mover's thread beside the steps. So it is few calls over much memory, each
of which lets go of the interpreter while it copies, and none that starts torch's own threads.

Legend: R rows (see KVCache.rows), B blocks of the cache, N blocks at hand, P bytes of a piece.
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
"""[R', N, P], some of the rows of some blocks; C-contiguous where it has been gathered."""


class CacheBlocks(Protocol):
    """num_rows, num_blocks, piece_bytes: R, B, P."""

    num_rows: int
    num_blocks: int
    piece_bytes: int

    def fence(self) -> object:
        """Said in the loop's thread: the steps that have been launched until now."""
        ...

    def begin(self, fence: object) -> None:
        """What is put from now on comes after those steps."""
        ...

    def gather(self, first_row: int, end_row: int, ids: Ids) -> Pieces:
        """A copy in host memory."""
        ...

    def put(self, first_row: int, end_row: int, ids: Ids, pieces: Pieces) -> None: ...

    def copy(self, ids: Ids, source: Pieces, theirs: Ids) -> None:
        """Whole blocks out of all rows of another cache, which is mapped here."""
        ...

    def settle(self) -> None:
        """Wait until all that was put is in its place."""
        ...


def blocks_of(cache: KVCache) -> CacheBlocks:
    rows = cache.rows
    return HostBlocks(rows.numpy()) if rows.device.type == "cpu" else DeviceBlocks(rows)


class HostBlocks:
    """rows: [R, B, P], the cache itself."""

    def __init__(self, rows: Pieces) -> None:
        self.num_rows, self.num_blocks, self.piece_bytes = rows.shape
        self._rows = rows

    def fence(self) -> object:
        """Steps on the CPU are over when they have been launched."""
        return None

    def begin(self, fence: object) -> None:
        pass

    def gather(self, first_row: int, end_row: int, ids: Ids) -> Pieces:
        # Another mode than "clip" copies twice; ids were checked when they were exported.
        out = np.empty((end_row - first_row, len(ids), self.piece_bytes), np.uint8)
        return np.take(self._rows[first_row:end_row], ids, axis=1, out=out, mode="clip")

    def put(self, first_row: int, end_row: int, ids: Ids, pieces: Pieces) -> None:
        self._rows[first_row:end_row, ids] = pieces

    def copy(self, ids: Ids, source: Pieces, theirs: Ids) -> None:
        """Where ids follow each other at both ends, in one go."""
        steps = (np.diff(ids) != 1) | (np.diff(theirs) != 1)
        starts = [0, *(np.flatnonzero(steps) + 1).tolist(), len(ids)]
        for start, end in pairwise(starts):
            ours, other, count = int(ids[start]), int(theirs[start]), end - start
            np.copyto(self._rows[:, ours : ours + count], source[:, other : other + count])

    def settle(self) -> None:
        pass


class DeviceBlocks:
    """rows: uint8 [R, B, P] on a device. Copies go through pinned memory, on a stream beside that
    of the steps. (torch's allocator gives pinned memory out again when its copies are done.)"""

    def __init__(self, rows: Tensor) -> None:
        self.num_rows, self.num_blocks, self.piece_bytes = rows.shape
        self._rows = rows
        self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._rows.device).record_event()
        return event

    def begin(self, fence: object) -> None:
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

    def settle(self) -> None:
        self._stream.synchronize()
