"""Changes in the tiers since the last report to the engine: contents, and counters.

A block's `content` is its chained hash, which identifies it.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Literal, get_args


class Changes:
    """The contents that were added to or removed from a tier. Only the latest change of each
    content is kept."""

    def __init__(self) -> None:
        self._is_there: dict[bytes, bool] = {}

    def add(self, content: bytes) -> None:
        self._is_there[content] = True

    def remove(self, content: bytes) -> None:
        self._is_there[content] = False

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Return the contents (added, removed) since the last call."""
        changes, self._is_there = self._is_there, {}
        added = [content for content, is_there in changes.items() if is_there]
        return added, [content for content, is_there in changes.items() if not is_there]


Tier = Literal["host", "disk"]
Kind = Literal["stored", "dropped", "loaded", "failed"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Counts:
    """Counts of blocks by tier and kind. The tiers' threads add to them.

    stored    written to the tier
    dropped   not written, for lack of space or time
    loaded    read from the tier
    failed    not read, because the block is gone or damaged
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[tuple[Tier, Kind]] = Counter()

    def add(self, tier: Tier, kind: Kind, count: int = 1) -> None:
        with self._lock:
            self._counts[tier, kind] += count

    def drain(self) -> Counter[tuple[Tier, Kind]]:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts
