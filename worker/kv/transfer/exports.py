"""Exported leases: the blocks that they protect, and the readers that have finished.

The engine reuses blocks as soon as it has sent KVWithdraw. So `on_reader_done` and `withdraw` share
a lock: after `withdraw` has returned, no reader gets a confirmation that its data is valid. Two
threads use the table: the loop adds and withdraws leases, and the server answers readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EndedLease:
    """Result of a reader's last message, KVDone.

    is_live    the data that the reader has received is valid
    is_taken   this was the last reader that the lease waited for
    """

    is_live: bool
    is_taken: bool


@dataclass(slots=True)
class ExportedLease:
    """A lease that readers can open.

    blocks        [B] ids, in the order of the sequence
    num_readers   number of readers that the lease waits for
    checkpoint    the checkpoint of the state after the last block; None: there is none
    opened        reader -> [first, end), indexes of the blocks that the reader reads
    done          readers that have finished
    """

    blocks: Ids
    num_readers: int
    checkpoint: int | None = None
    opened: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    done: set[bytes] = field(default_factory=set)


class Exports:
    """The table of leases. Thread-safe; a call waits only for another call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._leases: dict[bytes, ExportedLease] = {}

    def add(
        self, lease: bytes, blocks: Ids, num_readers: int, checkpoint: int | None = None
    ) -> None:
        """Add a lease. Raises ValueError if it exists already."""
        with self._lock:
            if lease in self._leases:
                raise ValueError(f"lease {lease.hex()} is already exported")
            self._leases[lease] = ExportedLease(blocks, num_readers, checkpoint)

    def withdraw(self, lease: bytes) -> None:
        """End a lease. An unknown lease is ignored."""
        with self._lock:
            self._leases.pop(lease, None)

    def open(self, lease: bytes, reader: bytes, first: int, count: int) -> Ids | None:
        """Open `count` blocks of a lease for a new reader, from index `first`, and return their
        ids; None if the lease has ended. Raises ValueError if the lease has no such blocks."""
        with self._lock:
            if (found := self._leases.get(lease)) is None:
                return None
            end = first + count
            if first < 0 or count < 1 or end > len(found.blocks):
                raise ValueError(
                    f"blocks {first} to {end} were requested of a lease with {len(found.blocks)}"
                )
            found.opened[reader] = first, end
            return found.blocks[first:end]

    def open_state(self, lease: bytes, reader: bytes) -> int | None:
        """Return the checkpoint of the state after the blocks that this reader has opened. Return
        None if it has not opened the lease, or the lease has ended. Raises ValueError if the lease
        has no state after these blocks."""
        with self._lock:
            found = self._leases.get(lease)
            if found is None or reader not in found.opened:
                return None
            if found.checkpoint is None or found.opened[reader][1] != len(found.blocks):
                raise ValueError(
                    f"a state was requested after block {found.opened[reader][1]} of a lease with "
                    f"{len(found.blocks)}, and with "
                    f"{'no state' if found.checkpoint is None else 'one after the last of them'}"
                )
            return found.checkpoint

    def opened(self, lease: bytes, reader: bytes) -> Ids | None:
        """Return the ids of the blocks that this reader has opened; None if it has not opened the
        lease, or the lease has ended."""
        with self._lock:
            found = self._leases.get(lease)
            if found is None or reader not in found.opened:
                return None
            first, end = found.opened[reader]
            return found.blocks[first:end]

    def on_reader_done(self, lease: bytes, reader: bytes) -> EndedLease:
        """Record that a reader has finished, successfully or not. Repetitions have no effect. If
        the reader has never opened the lease, its data is not valid."""
        with self._lock:
            if (found := self._leases.get(lease)) is None:
                return EndedLease(is_live=False, is_taken=False)
            is_new = reader not in found.done
            found.done.add(reader)
            is_last = len(found.done) == found.num_readers
            return EndedLease(is_live=reader in found.opened, is_taken=is_new and is_last)

    @property
    def is_being_read(self) -> bool:
        """Return whether any reader of an existing lease has opened it and has not finished."""
        with self._lock:
            return any(found.opened.keys() - found.done for found in self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)
