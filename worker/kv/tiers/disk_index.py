"""What a directory of blocks holds, how much that is, and what goes first. No file is touched here.

Entries stand in the order of their last use. The bound is for the whole directory, whichever model
a block is of, so a directory that has served another model before does not grow beyond it either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from worker.kv.tiers.changes import Changes


class Key(NamedTuple):
    """One block: the layout that it is of, and its chained hash."""

    layout: bytes
    content: bytes


class DiskIndex:
    """`changes`: of `layout` alone. To be used by one thread at a time."""

    def __init__(self, layout: bytes, max_bytes: int) -> None:
        self.num_bytes = 0
        self._layout = layout
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # last used last
        self.changes = Changes()

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        """Blocks of every layout."""
        return len(self._sizes)

    def add(self, key: Key, size: int) -> None:
        """Also where it is there already: it was used just now."""
        self.num_bytes += size - self._sizes.get(key, 0)
        if key not in self._sizes:
            self._tell(key, self.changes.add)
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def touch(self, key: Key) -> None:
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: Key) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self.num_bytes -= size
            self._tell(key, self.changes.remove)

    def evict_for(self, size: int) -> list[Key]:
        """Forget the least recently used until `size` more bytes fit: their files are to go."""
        gone = []
        while self._sizes and self.num_bytes + size > self._max_bytes:
            key = next(iter(self._sizes))
            self.remove(key)
            gone.append(key)
        return gone

    def replace(self, found: Mapping[Key, tuple[float, int]]) -> None:
        """What the directory really holds: key -> (last use, size)."""
        for key in [key for key in self._sizes if key not in found]:
            self.remove(key)
        for key, (_, size) in sorted(found.items(), key=lambda item: item[1][0]):
            self.add(key, size)

    def _tell(self, key: Key, change: Callable[[bytes], None]) -> None:
        if key.layout == self._layout:
            change(key.content)
