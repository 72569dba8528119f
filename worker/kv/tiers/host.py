"""Which place of a bounded pool of host memory holds which content. No memory here, only places.

A place is free, being filled, or findable. A findable one may be held by readers; one that nobody
holds is given away when a place is needed, the least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from threading import Lock

from worker.kv.tiers.changes import Changes


class HostTier:
    """`capacity` places, numbered from 0; one that was never used is taken last. Its methods may be
    called from any thread; each is O(1), or O(held) where the oldest places are held."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a tier of {capacity} blocks holds nothing")
        self.capacity = capacity
        self._lock = Lock()
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # findable; last used last
        self._free: list[int] = []
        self._num_touched = 0  # places from here on were never used
        self._filling: set[int] = set()
        self._holders: Counter[bytes] = Counter()
        self._changes = Changes()

    def __contains__(self, content: bytes) -> bool:
        return content in self._place_of

    def __len__(self) -> int:
        return len(self._place_of)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(appeared, disappeared) since this was asked last."""
        with self._lock:
            return self._changes.take()

    # ---- filling

    def take(self) -> int | None:
        """A place to be filled; None where all are held."""
        with self._lock:
            place = self._find_place()
            if place is not None:
                self._filling.add(place)
            return place

    def _find_place(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._num_touched < self.capacity:
            self._num_touched += 1
            return self._num_touched - 1
        gone = next((content for content in self._place_of if not self._holders[content]), None)
        if gone is None:
            return None
        self._changes.remove(gone)
        return self._place_of.pop(gone)

    def publish(self, content: bytes, place: int) -> None:
        """`place`, which was being filled, holds `content`. If another does already, this one is
        free again."""
        with self._lock:
            self._filling.remove(place)
            if content in self._place_of:
                self._free.append(place)
            else:
                self._place_of[content] = place
                self._changes.add(content)

    def give_back(self, place: int) -> None:
        """`place`, which was being filled, is free again."""
        with self._lock:
            self._filling.remove(place)
            self._free.append(place)

    # ---- reading

    def hold(self, content: bytes) -> int | None:
        """Where `content` is, until `release`; None if it is nowhere."""
        with self._lock:
            place = self._place_of.get(content)
            if place is not None:
                self._holders[content] += 1
            return place

    def release(self, content: bytes) -> None:
        """One holder less."""
        with self._lock:
            assert self._holders[content] > 0, "released by nobody"
            self._holders[content] -= 1
            if not self._holders[content]:
                del self._holders[content]

    def touch(self, content: bytes) -> None:
        """It is used: of all that are here it goes last."""
        with self._lock:
            if content in self._place_of:
                self._place_of.move_to_end(content)

    def check(self) -> None:
        """Every place is free, being filled, or findable; for tests."""
        places = sorted([*self._place_of.values(), *self._free, *self._filling])
        assert places == list(range(self._num_touched)), "a place is lost, or has two uses"
        assert self._num_touched <= self.capacity
        assert set(self._holders) <= set(self._place_of), "what is held was given away"
