"""ZeroMQ mover: requests chunks one by one; works with any host and through any proxy."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from protocol.kv_peers import WINDOW, KVChunk
from worker.kv.blocks import CacheBlocks
from worker.kv.movers.base import DamagedTransfer, PollHint
from worker.kv.transfer.cuts import Cuts
from worker.kv.transfer.exports import Ids

CHUNK_BYTES = 1 << 20
"""Size of the chunks we send. A chunk stays in a core's cache while it is gathered, checksummed and
sent."""


def cuts_of(blocks: CacheBlocks, num_blocks: int, chunk_bytes: int) -> Cuts:
    """Return the chunks of `num_blocks` blocks; both ends compute the same ones."""
    return Cuts(
        num_rows=blocks.num_rows,
        piece_bytes=blocks.piece_bytes,
        num_blocks=num_blocks,
        max_bytes=chunk_bytes,
    )


class ZmqMover:
    """Copies blocks from chunks. `request(n)` sends KVRead for chunk n."""

    name = "zmq"

    def __init__(
        self, blocks: CacheBlocks, ids: Ids, chunk_bytes: int, request: Callable[[int], None]
    ) -> None:
        self._blocks = blocks
        self._ids = ids
        self._cuts = cuts_of(blocks, len(ids), chunk_bytes)
        self._request = request
        self._num_requested = 0
        self._pending: set[int] = set()  # requested, not received
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
        rows, blocks = cut.shape
        shape = rows, blocks, self._blocks.piece_bytes
        if len(chunk.data) != rows * blocks * self._blocks.piece_bytes:
            raise DamagedTransfer(
                f"chunk {chunk.chunk} has {len(chunk.data)} bytes; its shape is {shape}"
            )
        if zlib.crc32(chunk.data.data) != chunk.crc32:
            raise DamagedTransfer(f"chunk {chunk.chunk} does not match its checksum")
        self._pending.remove(chunk.chunk)
        self._request_next()
        pieces = np.frombuffer(chunk.data.data, np.uint8).reshape(shape)
        ids = self._ids[cut.first : cut.end]
        self._blocks.put(cut.first_row, cut.end_row, ids, pieces)

    def stop(self) -> bool:
        self._blocks.synchronize()
        return True

    def _request_next(self) -> None:
        if self._num_requested < len(self._cuts):
            self._pending.add(self._num_requested)
            self._request(self._num_requested)
            self._num_requested += 1
