"""What the tiers did, counted by the threads that do it, told to the engine as differences."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Literal, get_args

Tier = Literal["host", "disk"]
Kind = Literal["stored", "dropped", "loaded", "failed"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Counts:
    """Blocks by tier and kind: what was to be stored, and was, or had no room or time; what was to
    be loaded, and was, or was gone or damaged."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[tuple[Tier, Kind]] = Counter()

    def add(self, tier: Tier, kind: Kind, count: int = 1) -> None:
        with self._lock:
            self._counts[tier, kind] += count

    def take(self) -> Counter[tuple[Tier, Kind]]:
        """Since this was asked last."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts
