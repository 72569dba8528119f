"""What a transfer asks of the way its bytes come, at the end that reads."""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from protocol.kv_peers import KVChunk


class PollHint(Enum):
    """When a mover wants to be called again."""

    NOW = auto()  # there is more to do
    SOON = auto()  # somebody else is at it
    MESSAGE = auto()  # when the peer has said something
    DONE = auto()  # all is in its place


class DamagedTransfer(Exception):
    """What has come is not what was sent."""


class TransferLost(Exception):
    """The peer's memory is out of reach."""


class Mover(Protocol):
    """One transfer's. All calls come from one thread, and none takes longer than a few
    milliseconds: others wait."""

    name: str

    def advance(self) -> PollHint:
        """Do some of what there is to do. Raises Damaged or Lost."""
        ...

    def receive(self, chunk: KVChunk) -> None:
        """What the peer has sent, while it moves. Raises Damaged."""
        ...

    def stop(self) -> bool:
        """Write no more. False while something still may: to be asked again soon. When this has
        been True, or `advance` DONE, nothing of the transfer is held any more."""
        ...
