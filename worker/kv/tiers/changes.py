"""Changes in the tiers since the last report to the engine: contents, and counters.

A content is a block or a state, which its `key` identifies (protocol/worker/kv.py).
"""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Literal, get_args


class Changes:
    """The keys that were added to or removed from a tier. Only the latest change of each key is
    kept."""

    def __init__(self) -> None:
        self._is_there: dict[bytes, bool] = {}

    def add(self, key: bytes) -> None:
        self._is_there[key] = True

    def remove(self, key: bytes) -> None:
        self._is_there[key] = False

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys (added, removed) since the last call."""
        changes, self._is_there = self._is_there, {}
        added = [key for key, is_there in changes.items() if is_there]
        return added, [key for key, is_there in changes.items() if not is_there]


Tier = Literal["host", "disk"]
Kind = Literal["stored", "dropped", "loaded", "failed"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Counts:
    """Counts of blocks and states by tier and kind. The tiers' threads add to them.

    stored    written to the tier
    dropped   not written, for lack of space or time
    loaded    read from the tier
    failed    not read, because the content is gone or damaged
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
