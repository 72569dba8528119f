"""Reports of the K/V threads to the engine, queued until the loop sends them."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock

from protocol.kv import KVFailure, KVFetched, KVReport, KVTierNews


class ReportQueue:
    """`fd` is readable if there may be reports. Any thread may add; only the loop drains."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()
        self._ends: list[KVFetched | KVFailure] = []
        self._taken: list[bytes] = []
        self._tier_reports: Callable[[], list[KVTierNews]] = list
        self._crash: Exception | None = None

    def add_end(self, end: KVFetched | KVFailure) -> None:
        """Report the end of a job."""
        with self._lock:
            self._ends.append(end)
        self.wake()

    def add_taken(self, lease: bytes) -> None:
        with self._lock:
            self._taken.append(lease)
        self.wake()

    def set_tier_reports(self, tier_reports: Callable[[], list[KVTierNews]]) -> None:
        """Add the result of `tier_reports` to every report. Call `wake` if it has something new."""
        self._tier_reports = tier_reports
        self.wake()

    def guard(self, work: Callable[[], None]) -> Callable[[], None]:
        """Wrap a thread's function so that `drain` raises its exception in the loop."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # raised in the loop, as the worker's own failures are
                self._crash = error
                self.wake()

        return guarded

    def drain(self) -> KVReport | None:
        """Return everything since the last call, or None. Raises the exception of a thread."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:  # every addition wakes, so there is none
            return None
        if self._crash is not None:
            raise self._crash
        with self._lock:
            ends, taken = self._ends, self._taken
            self._ends, self._taken = [], []
        tiers = self._tier_reports()
        if not ends and not taken and not tiers:
            return None  # the last call returned it, between its addition and the wake
        return KVReport(
            fetched=[end for end in ends if isinstance(end, KVFetched)],
            failed=[end for end in ends if isinstance(end, KVFailure)],
            taken=taken,
            tiers=tiers,
        )

    def close(self) -> None:
        os.close(self.fd)

    def wake(self) -> None:
        """Make `fd` readable."""
        os.eventfd_write(self.fd, 1)
