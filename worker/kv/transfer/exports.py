"""Which leases there are, whose blocks they keep, and who has done with them.

The engine reuses blocks as soon as it has said KVWithdraw, so "is it still live?" and "withdraw"
are one order: when `withdraw` has returned, no reader is told any more that what it has read is
right. Two threads come here: the loop adds and withdraws, the server asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EndedLease:
    """What a reader's last word leads to.

    is_live    what it has read is right
    is_taken   it was the last one awaited
    """

    is_live: bool
    is_taken: bool


@dataclass(slots=True)
class ExportedLease:
    """blocks: [B] ids in the order of the sequence; opened: who reads which of them, by the indexes
    of the first and of the first that is not; done: who will not come again."""

    blocks: Ids
    num_readers: int
    opened: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    done: set[bytes] = field(default_factory=set)


class Exports:
    """The table. No call waits for anything but another call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._leases: dict[bytes, ExportedLease] = {}

    def add(self, lease: bytes, blocks: Ids, num_readers: int) -> None:
        """Raises ValueError on a lease that is there already."""
        with self._lock:
            if lease in self._leases:
                raise ValueError(f"lease {lease.hex()} is exported already")
            self._leases[lease] = ExportedLease(blocks, num_readers)

    def withdraw(self, lease: bytes) -> None:
        """From now on it is over. An unknown one is."""
        with self._lock:
            self._leases.pop(lease, None)

    def open(self, lease: bytes, reader: bytes, first: int, count: int) -> Ids | None:
        """The blocks; None where the lease is over. Raises ValueError where it has not so many."""
        with self._lock:
            if (found := self._leases.get(lease)) is None:
                return None
            end = first + count
            if first < 0 or count < 1 or end > len(found.blocks):
                raise ValueError(
                    f"blocks {first} to {end} are wanted of a lease that has {len(found.blocks)}"
                )
            found.opened[reader] = first, end
            return found.blocks[first:end]

    def opened(self, lease: bytes, reader: bytes) -> Ids | None:
        """What this reader has opened; None where the lease is over, or never was opened by it."""
        with self._lock:
            found = self._leases.get(lease)
            if found is None or reader not in found.opened:
                return None
            first, end = found.opened[reader]
            return found.blocks[first:end]

    def part(self, lease: bytes, reader: bytes) -> EndedLease:
        """The reader will not come again, with or without what it came for. To say so twice is to
        say it once; who never opened has read nothing that could be right."""
        with self._lock:
            if (found := self._leases.get(lease)) is None:
                return EndedLease(is_live=False, is_taken=False)
            is_news = reader not in found.done
            found.done.add(reader)
            is_last = len(found.done) == found.num_readers
            return EndedLease(is_live=reader in found.opened, is_taken=is_news and is_last)

    @property
    def is_being_read(self) -> bool:
        """Somebody has opened a lease, and has not done with it."""
        with self._lock:
            return any(found.opened.keys() - found.done for found in self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)
