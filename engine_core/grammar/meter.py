"""Measures what each of several concurrent compilations keeps on the C heap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Measurement:
    used_at_start: int
    #: Bytes that others had allocated before the start, and may have freed since.
    used_by_others: int


class CompileMeter:
    """Computes an upper bound of the bytes that each compilation keeps.

    The heap belongs to all threads. What a concurrent compilation allocates is counted too, and
    what it may free is added, so that no result is too low. A compilation that runs alone is
    measured exactly.

    used_bytes   a function that returns the bytes in use on the heap
    """

    def __init__(self, used_bytes: Callable[[], int]) -> None:
        self._used_bytes = used_bytes
        self._lock = threading.Lock()
        self._running: dict[bytes, _Measurement] = {}

    def start(self, digest: bytes) -> None:
        """Begin to measure a compilation."""
        with self._lock:
            used = self._used_bytes()
            others = (max(used - other.used_at_start, 0) for other in self._running.values())
            self._running[digest] = _Measurement(used, sum(others))

    def finish(self, digest: bytes) -> int:
        """Return the bytes that the compilation keeps. Its result must still exist."""
        with self._lock:
            measurement = self._running.pop(digest)
            grown = self._used_bytes() - measurement.used_at_start
            return max(grown + measurement.used_by_others, 0)
