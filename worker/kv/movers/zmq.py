"""Chunks through ZeroMQ, asked for one by one: to any host, through any proxy."""

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
"""Of chunks that we send: it fits into a core's cache between gathering, summing and sending."""


def cuts_of(blocks: CacheBlocks, num_blocks: int, chunk_bytes: int) -> Cuts:
    """How both ends cut `num_blocks` blocks of a cache."""
    return Cuts(
        num_rows=blocks.num_rows,
        piece_bytes=blocks.piece_bytes,
        num_blocks=num_blocks,
        most_bytes=chunk_bytes,
    )


class ZmqMover:
    """ask: says KVRead for the chunk of that number."""

    name = "zmq"

    def __init__(
        self, blocks: CacheBlocks, ids: Ids, chunk_bytes: int, ask: Callable[[int], None]
    ) -> None:
        self._blocks = blocks
        self._ids = ids
        self._cuts = cuts_of(blocks, len(ids), chunk_bytes)
        self._ask = ask
        self._num_asked = 0
        self._due: set[int] = set()  # asked for, and not here
        for _ in range(WINDOW):
            self._ask_next()

    def advance(self) -> PollHint:
        if self._due:
            return PollHint.MESSAGE
        self._blocks.settle()
        return PollHint.DONE

    def receive(self, chunk: KVChunk) -> None:
        if chunk.chunk not in self._due:
            raise DamagedTransfer(f"chunk {chunk.chunk} was not asked for")
        cut = self._cuts[chunk.chunk]
        rows, blocks = cut.shape
        shape = rows, blocks, self._blocks.piece_bytes
        if len(chunk.data) != rows * blocks * self._blocks.piece_bytes:
            raise DamagedTransfer(f"chunk {chunk.chunk} has {len(chunk.data)} bytes, of {shape}")
        if zlib.crc32(chunk.data.data) != chunk.crc32:
            raise DamagedTransfer(f"chunk {chunk.chunk} has another checksum than it was sent with")
        self._due.remove(chunk.chunk)
        self._ask_next()
        pieces = np.frombuffer(chunk.data.data, np.uint8).reshape(shape)
        ids = self._ids[cut.first : cut.end]
        self._blocks.put(cut.first_row, cut.end_row, ids, pieces)

    def stop(self) -> bool:
        self._blocks.settle()
        return True

    def _ask_next(self) -> None:
        if self._num_asked < len(self._cuts):
            self._due.add(self._num_asked)
            self._ask(self._num_asked)
            self._num_asked += 1
