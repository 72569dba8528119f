"""ZeroMQ mover: requests the blocks in chunks. It works between any hosts and through any proxy.

Both ends divide the blocks into the same chunks (`Cuts`).

Legend: R rows of a cache (each layer's keys, then each layer's values), B blocks, P bytes of a
piece, which is the part of a block in one row. A checkpoint of a recurrent state is a block with
one row.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from protocol.worker.kv_peers import WINDOW, KVChunk
from worker.kv.blocks import WHOLE, WORD_BYTES, CacheBlocks
from worker.kv.movers.base import DamagedTransfer, PollHint
from worker.kv.transfer.exports import Ids

CHUNK_BYTES = 1 << 20
"""Most bytes of a chunk that this worker sends. A chunk of this size stays in a core's cache while
it is gathered, checksummed and sent."""


class Cut(NamedTuple):
    """The pieces in one chunk: rows [first_row, end_row) of the blocks [first, end), which are
    indexes into the transferred blocks. `part` are the bytes of each piece."""

    first_row: int
    end_row: int
    first: int
    end: int
    part: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Return (number of rows, number of blocks)."""
        return self.end_row - self.first_row, self.end - self.first


class Cuts:
    """The chunks of `num_blocks` blocks. A chunk has whole blocks if at least one fits, otherwise
    some rows of one block if at least one fits, otherwise some bytes of one piece. Its size is at
    most `max_bytes`, but at least WORD_BYTES."""

    def __init__(self, *, num_rows: int, piece_bytes: int, num_blocks: int, max_bytes: int) -> None:
        pieces = max(1, max_bytes // piece_bytes)
        self._num_rows, self._num_blocks = num_rows, num_blocks
        self._rows = min(pieces, num_rows)
        self._blocks = max(1, pieces // num_rows)
        self._bytes = piece_bytes
        if max_bytes < piece_bytes:
            self._bytes = max(max_bytes // WORD_BYTES, 1) * WORD_BYTES
        self._per_row = -(-piece_bytes // self._bytes)  # 1 if a chunk holds whole pieces
        #: 1 if a chunk holds whole blocks.
        self._per_block = -(-num_rows // self._rows) * self._per_row

    def __len__(self) -> int:
        return self._per_block * -(-self._num_blocks // self._blocks)

    def __getitem__(self, chunk: int) -> Cut:
        """Return the pieces of a chunk. Raises IndexError after the last chunk."""
        if not 0 <= chunk < len(self):
            raise IndexError(f"chunk {chunk} of {len(self)}")
        group, in_block = divmod(chunk, self._per_block)
        rows, in_row = divmod(in_block, self._per_row)
        row, block, start = rows * self._rows, group * self._blocks, in_row * self._bytes
        part = WHOLE if self._per_row == 1 else slice(start, start + self._bytes)
        return Cut(
            row,
            min(row + self._rows, self._num_rows),
            block,
            min(block + self._blocks, self._num_blocks),
            part,
        )


def cuts_of(blocks: CacheBlocks, num_blocks: int, chunk_bytes: int) -> Cuts:
    """Return the chunks of `num_blocks` blocks of a cache. Both ends compute the same chunks."""
    return Cuts(
        num_rows=blocks.num_rows,
        piece_bytes=blocks.piece_bytes,
        num_blocks=num_blocks,
        max_bytes=chunk_bytes,
    )


class ZmqMover:
    """Requests chunks and copies their pieces to the blocks `ids`. `request(n)` sends KVRead for
    chunk n."""

    name = "zmq"

    def __init__(
        self, blocks: CacheBlocks, ids: Ids, chunk_bytes: int, request: Callable[[int], None]
    ) -> None:
        self._blocks = blocks
        self._ids = ids
        self._cuts = cuts_of(blocks, len(ids), chunk_bytes)
        self._request = request
        self._num_requested = 0
        self._pending: set[int] = set()  # chunks that were requested and have not arrived
        for _ in range(WINDOW):
            self._request_next()

    def advance(self) -> PollHint:
        if self._pending:
            return PollHint.MESSAGE
        self._blocks.synchronize()
        return PollHint.DONE

    def receive(self, chunk: KVChunk) -> None:
        if chunk.chunk not in self._pending:
            raise DamagedTransfer(f"unexpected chunk {chunk.chunk}")
        cut = self._cuts[chunk.chunk]
        shape = *cut.shape, len(range(*cut.part.indices(self._blocks.piece_bytes)))
        if len(chunk.data) != math.prod(shape):
            raise DamagedTransfer(
                f"chunk {chunk.chunk} has {len(chunk.data)} bytes; its shape is {shape}"
            )
        if zlib.crc32(chunk.data.data) != chunk.crc32:
            raise DamagedTransfer(f"chunk {chunk.chunk} does not match its checksum")
        self._pending.remove(chunk.chunk)
        self._request_next()
        pieces = np.frombuffer(chunk.data.data, np.uint8).reshape(shape)
        ids = self._ids[cut.first : cut.end]
        self._blocks.put(cut.first_row, cut.end_row, ids, pieces, cut.part)

    def stop(self) -> bool:
        self._blocks.synchronize()
        return True

    def _request_next(self) -> None:
        if self._num_requested < len(self._cuts):
            self._pending.add(self._num_requested)
            self._request(self._num_requested)
            self._num_requested += 1
