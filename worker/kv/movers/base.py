"""Interface of movers, which copy the bytes of a transfer at the reading end."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from protocol.kv_peers import KVChunk


class PollHint(Enum):
    """When to call a mover's `advance` again."""

    NOW = auto()  # it has more work
    SOON = auto()  # something else is working
    MESSAGE = auto()  # after a message from the peer
    DONE = auto()  # everything is in place


class DamagedTransfer(Exception):
    """The received bytes or offer differ from what was sent."""


class TransferLost(Exception):
    """The peer's memory cannot be reached."""


class Mover(Protocol):
    """Copies the blocks of one transfer. All calls come from one thread and return within a few
    milliseconds, because other transfers wait."""

    name: str

    def advance(self) -> PollHint:
        """Do some of the work. Raises DamagedTransfer or TransferLost."""
        ...

    def receive(self, chunk: KVChunk) -> None:
        """Handle a chunk from the peer. Raises DamagedTransfer."""
        ...

    def stop(self) -> bool:
        """Stop writing. Returns False if something may still write; call it again soon. After it
        returned True, or `advance` returned DONE, the mover holds nothing of the transfer."""
        ...
