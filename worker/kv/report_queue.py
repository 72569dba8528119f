"""Reports of the K/V threads to the engine, queued until the loop sends them."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock

from protocol.worker.kv import KVFailure, KVFetched, KVReport, KVTierNews


class ReportQueue:
    """Queue from the K/V threads to the loop. `fd` is readable if there may be reports. Any thread
    may add reports; only the loop drains them."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = Lock()
        self._results: list[KVFetched | KVFailure] = []
        self._taken: list[bytes] = []
        self._tier_reports: Callable[[], list[KVTierNews]] = list
        self._crash: Exception | None = None

    def add_result(self, result: KVFetched | KVFailure) -> None:
        """Add the result of a fetch job."""
        with self._lock:
            self._results.append(result)
        self.wake()

    def add_taken(self, lease: bytes) -> None:
        """Add a lease whose readers are all done."""
        with self._lock:
            self._taken.append(lease)
        self.wake()

    def set_tier_reports(self, tier_reports: Callable[[], list[KVTierNews]]) -> None:
        """Call `tier_reports` for every report and include its result. The tiers call `wake`
        when they have something to report."""
        self._tier_reports = tier_reports
        self.wake()

    def guard(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return `work` for a thread, wrapped so that `drain` raises its exception in the loop."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # `drain` raises it in the loop
                self._crash = error
                self.wake()

        return guarded

    def drain(self) -> KVReport | None:
        """Return a report of everything added since the last call, or None. Raises the exception of
        a thread that failed."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:  # `add_*` make `fd` readable, so nothing was added
            return None
        if self._crash is not None:
            raise self._crash
        with self._lock:
            results, taken = self._results, self._taken
            self._results, self._taken = [], []
        tiers = self._tier_reports()
        if not results and not taken and not tiers:
            return None  # the last call ran after an addition, but before its wake
        return KVReport(
            fetched=[each for each in results if isinstance(each, KVFetched)],
            failed=[each for each in results if isinstance(each, KVFailure)],
            taken=taken,
            tiers=tiers,
        )

    def close(self) -> None:
        os.close(self.fd)

    def wake(self) -> None:
        """Make `fd` readable."""
        os.eventfd_write(self.fd, 1)
