"""Counters of the tiers, incremented by their threads and sent to the engine as differences."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Literal, get_args

Tier = Literal["host", "disk"]
Kind = Literal["stored", "dropped", "loaded", "failed"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Counts:
    """Blocks by tier and kind.

    stored, dropped   written to the tier, or not, for lack of space or time
    loaded, failed    read from the tier, or not, because they are gone or damaged
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
