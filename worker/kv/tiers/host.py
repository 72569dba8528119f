"""Index of a bounded pool of host memory: the content of each place. It holds no memory itself.

A place is free, reserved for filling, or published. A published place may be held by readers. If a
place is needed, the least recently used published place that nobody holds is reused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from threading import Lock

from worker.kv.tiers.changes import Changes


class HostTier:
    """`capacity` places, numbered from 0; places that were never used are taken last. Thread-safe.
    Each method is O(1), or O(held) if the oldest places are held."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a tier must hold at least one block, not {capacity}")
        self.capacity = capacity
        self._lock = Lock()
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free: list[int] = []
        self._num_touched = 0  # places from here on were never used
        self._filling: set[int] = set()
        self._holders: Counter[bytes] = Counter()
        self._changes = Changes()

    def __contains__(self, content: bytes) -> bool:
        return content in self._places

    def __len__(self) -> int:
        return len(self._places)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return (added, removed) contents since the last call."""
        with self._lock:
            return self._changes.drain()

    # ---- filling

    def reserve(self) -> int | None:
        """Return a place to fill; None if all are held."""
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
        evicted = next((content for content in self._places if not self._holders[content]), None)
        if evicted is None:
            return None
        self._changes.remove(evicted)
        return self._places.pop(evicted)

    def publish(self, content: bytes, place: int) -> None:
        """Publish a reserved place with its content. If another place already has that content,
        this one becomes free."""
        with self._lock:
            self._filling.remove(place)
            if content in self._places:
                self._free.append(place)
            else:
                self._places[content] = place
                self._changes.add(content)

    def give_back(self, place: int) -> None:
        """Free a reserved place."""
        with self._lock:
            self._filling.remove(place)
            self._free.append(place)

    # ---- reading

    def hold(self, content: bytes) -> int | None:
        """Return the place of `content` and keep it until `release`; None if there is none."""
        with self._lock:
            place = self._places.get(content)
            if place is not None:
                self._holders[content] += 1
            return place

    def release(self, content: bytes) -> None:
        """Remove one holder."""
        with self._lock:
            assert self._holders[content] > 0, "released without a holder"
            self._holders[content] -= 1
            if not self._holders[content]:
                del self._holders[content]

    def touch(self, content: bytes) -> None:
        """Mark the content as used, so that it is evicted last."""
        with self._lock:
            if content in self._places:
                self._places.move_to_end(content)

    def check(self) -> None:
        """Check that every place is free, reserved, or published; for tests."""
        places = sorted([*self._places.values(), *self._free, *self._filling])
        assert places == list(range(self._num_touched)), "a place is lost, or used twice"
        assert self._num_touched <= self.capacity
        assert set(self._holders) <= set(self._places), "a held place was reused"
