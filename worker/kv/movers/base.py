"""Interface of movers, which copy the bytes of a transfer. They run in the worker that receives the
bytes."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from protocol.worker.kv_peers import KVChunk


class PollHint(Enum):
    """The time at which a mover's `advance` must be called again."""

    NOW = auto()  # at once: the mover has more work
    SOON = auto()  # shortly: the hardware or another thread is working
    MESSAGE = auto()  # after the next message from the peer
    DONE = auto()  # never: all blocks are in place


class DamagedTransfer(Exception):
    """Raised if received bytes are damaged, or if an offer contradicts itself or the blocks."""


class TransferLost(Exception):
    """Raised if the peer's memory cannot be reached."""


class Mover(Protocol):
    """Copies the blocks of one transfer. All calls are made by one thread, and return within a few
    milliseconds, because other transfers wait for that thread."""

    name: str

    def advance(self) -> PollHint:
        """Do some of the work, and return when to call again. Raises DamagedTransfer if the data is
        damaged, and TransferLost if the peer's memory can no longer be read."""
        ...

    def receive(self, chunk: KVChunk) -> None:
        """Handle a chunk that the peer has sent. Raises DamagedTransfer if it is damaged, or was
        not requested."""
        ...

    def stop(self) -> bool:
        """Stop writing into the blocks. Return False if writes may still happen; then call again
        soon. The mover holds no resources once this has returned True or `advance` has returned
        DONE."""
        ...
