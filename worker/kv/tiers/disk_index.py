"""Index of a directory of blocks: contents, sizes, and order of eviction. Does no I/O.

Entries are in the order of their last use. The size limit is for the whole directory, including
blocks of other models, so a directory that served another model does not exceed it either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from worker.kv.tiers.changes import Changes


class Key(NamedTuple):
    """A block: the layout of its cache, and its chained hash."""

    layout: bytes
    content: bytes


class DiskIndex:
    """Not thread-safe. `changes` has the additions and removals of `layout` only."""

    def __init__(self, layout: bytes, max_bytes: int) -> None:
        self.num_bytes = 0
        self._layout = layout
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self.changes = Changes()

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        """Return the number of blocks of all layouts."""
        return len(self._sizes)

    def add(self, key: Key, size: int) -> None:
        """Add a block, or mark it as used."""
        self.num_bytes += size - self._sizes.get(key, 0)
        if key not in self._sizes:
            self._record(key, self.changes.add)
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def touch(self, key: Key) -> None:
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: Key) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self.num_bytes -= size
            self._record(key, self.changes.remove)

    def evict_for(self, size: int) -> list[Key]:
        """Remove the least recently used blocks until `size` more bytes fit, and return them. The
        caller deletes their files."""
        evicted = []
        while self._sizes and self.num_bytes + size > self._max_bytes:
            key = next(iter(self._sizes))
            self.remove(key)
            evicted.append(key)
        return evicted

    def replace(self, found: Mapping[Key, tuple[float, int]]) -> None:
        """Set the contents to those of the directory: key -> (last use, size)."""
        for key in [key for key in self._sizes if key not in found]:
            self.remove(key)
        for key, (_, size) in sorted(found.items(), key=lambda item: item[1][0]):
            self.add(key, size)

    def _record(self, key: Key, change: Callable[[bytes], None]) -> None:
        if key.layout == self._layout:
            change(key.content)
