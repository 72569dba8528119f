"""Shared-memory mover: maps the peer's cache into this process and copies from it directly.

Each transfer has its own mapping and removes it at its end, because a mapping keeps the peer's
memory allocated even after the peer has exited.
"""

from __future__ import annotations

import numpy as np

from protocol.worker.kv_peers import KVChunk, ShmOffer
from worker.kv.blocks import WHOLE, WORD_BYTES, CacheBlocks, Pieces
from worker.kv.movers.base import DamagedTransfer, PollHint
from worker.kv.transfer.exports import Ids
from worker.kv.transfer.shared_memory import map_offered

SLICE_BYTES = 4 << 20
"""Bytes copied by one call of `advance`. Other transfers run between two calls. A block that is
larger, such as a checkpoint of a large state, is copied in parts."""


class ShmMover:
    """Copies the blocks `theirs` [B] of the peer's cache to our blocks `ids` [B].

    The constructor raises TransferLost if the memory cannot be mapped, and DamagedTransfer if the
    offer contradicts itself or the blocks.
    """

    name = "shm"

    def __init__(self, blocks: CacheBlocks, ids: Ids, theirs: Ids, offer: ShmOffer) -> None:
        shape = blocks.num_rows, offer.num_blocks, blocks.piece_bytes
        if int(np.prod(shape, dtype=np.int64)) != offer.num_bytes or not len(theirs):
            raise DamagedTransfer(f"{offer.num_bytes} bytes do not fit a cache of shape {shape}")
        if theirs.min() < 0 or theirs.max() >= offer.num_blocks:
            raise DamagedTransfer(f"a block is outside the {offer.num_blocks} of the peer's cache")
        self._source: Pieces | None = np.frombuffer(map_offered(offer), np.uint8).reshape(shape)
        self._blocks, self._ids, self._theirs = blocks, ids, theirs
        self._at_once = max(1, SLICE_BYTES // (blocks.num_rows * blocks.piece_bytes))
        self._parts = _parts(blocks)
        self._num_copied = self._num_parts = 0

    def advance(self) -> PollHint:
        assert self._source is not None, "the transfer is done"
        some = slice(self._num_copied, self._num_copied + self._at_once)
        part = self._parts[self._num_parts]
        self._blocks.copy(self._ids[some], self._source, self._theirs[some], part)
        self._num_parts += 1
        if self._num_parts < len(self._parts):
            return PollHint.NOW
        self._num_parts = 0
        self._num_copied += self._at_once
        if self._num_copied < len(self._ids):
            return PollHint.NOW
        self.stop()
        return PollHint.DONE

    def receive(self, chunk: KVChunk) -> None:
        raise DamagedTransfer(f"unexpected chunk {chunk.chunk}")

    def stop(self) -> bool:
        self._blocks.synchronize()
        self._source = None  # the mapping is freed with its last view
        return True


def _parts(blocks: CacheBlocks) -> list[slice]:
    """Return the parts of a piece of which one is copied at a time, in all rows of a block. If a
    block is at most SLICE_BYTES large, there is one."""
    size, num_rows = blocks.piece_bytes, blocks.num_rows
    if num_rows * size <= SLICE_BYTES:
        return [WHOLE]
    step = max(SLICE_BYTES // num_rows // WORD_BYTES, 1) * WORD_BYTES
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
