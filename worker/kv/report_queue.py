"""What the threads beside the loop have to tell the engine, gathered until the loop sends it."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock

from protocol.kv import KVFailure, KVFetched, KVReport, KVTierNews


class ReportQueue:
    """`fd` can be read when there may be some. Any thread adds; the loop takes."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()
        self._ends: list[KVFetched | KVFailure] = []
        self._taken: list[bytes] = []
        self._tiers: Callable[[], list[KVTierNews]] = list
        self._crash: Exception | None = None

    def add_end(self, end: KVFetched | KVFailure) -> None:
        """A job is over."""
        with self._lock:
            self._ends.append(end)
        self.wake()

    def add_taken(self, lease: bytes) -> None:
        with self._lock:
            self._taken.append(lease)
        self.wake()

    def ask_of_tiers(self, tiers: Callable[[], list[KVTierNews]]) -> None:
        """From now on what `tiers` returns is part of the news; `wake` says that there is some."""
        self._tiers = tiers
        self.wake()

    def guard(self, work: Callable[[], None]) -> Callable[[], None]:
        """The same as a thread runs it: what it dies of is raised by `take`, in the loop."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # told where the worker's own failures are
                self._crash = error
                self.wake()

        return guarded

    def take(self) -> KVReport | None:
        """All that has come since the last time; None: nothing. Raises what a thread died of."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:  # whoever adds, wakes
            return None
        if self._crash is not None:
            raise self._crash
        with self._lock:
            ends, taken = self._ends, self._taken
            self._ends, self._taken = [], []
        tiers = self._tiers()
        if not ends and not taken and not tiers:
            return None  # taken the last time, between their coming and the wake
        return KVReport(
            fetched=[end for end in ends if isinstance(end, KVFetched)],
            failed=[end for end in ends if isinstance(end, KVFailure)],
            taken=taken,
            tiers=tiers,
        )

    def close(self) -> None:
        os.close(self.fd)

    def wake(self) -> None:
        """There may be some."""
        os.eventfd_write(self.fd, 1)
