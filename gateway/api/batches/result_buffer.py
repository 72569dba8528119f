"""Results of a batch on their way to the store.

If there is no room for them, because the store has reached its limit or because the disk is full,
they are kept here, and the batch starts no more lines. Storing them is retried after a pause.
So no line is computed twice, and the results need no more memory than those of the open lines.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial

from gateway.api.batches.responses import PAUSED
from gateway.store.batch_database import BatchDatabase, LineResult, StoreFull
from gateway.store.batch_queries import StoredBatch
from gateway.store.sqlite_file import Store

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0
"""The pause after the first failure, which doubles with each further failure in a row, and the
longest pause."""


class ResultBuffer:
    """Results that are not stored yet. Only one greenlet at a time may call `flush`.

    on_stored   is called with results that were stored
    """

    def __init__(
        self,
        store: Store[BatchDatabase],
        batch: StoredBatch,
        on_stored: Callable[[Sequence[LineResult]], None],
    ) -> None:
        self._store = store
        self._batch = batch
        self._on_stored = on_stored
        self._results: list[LineResult] = []
        self._was_tried = False
        self._num_failures = 0  # in a row
        self._retry_at = 0.0

    @property
    def is_empty(self) -> bool:
        return not self._results

    @property
    def is_paused(self) -> bool:
        """Whether there was no room at the last attempt."""
        return self._num_failures > 0

    def add(self, result: LineResult) -> None:
        self._results.append(result)

    def retry_now(self) -> None:
        """Do not wait before the next attempt to store the results."""
        self._retry_at = 0.0

    def flush(self, now: float, *, is_last: bool = False, has_limit: bool = True) -> bool:
        """Store the results, unless it is too early to try again. The first attempt, and those of a
        paused batch, find out whether there is room, even without results. Return False if this
        process has lost the batch. Raises sqlite3.Error if the store cannot be used at all.

        now        time of a clock that only moves forward
        is_last    try now, because there is no later attempt
        has_limit  whether the size limit of the store applies
        """
        if now < self._retry_at and not is_last:
            return True
        if not self._results and (is_last or (self._was_tried and not self.is_paused)):
            return True
        self._was_tried = True
        results = list(self._results)
        work = partial(_add_results, self._batch, results, has_limit)
        try:
            is_ours = self._store.call(work)
        except StoreFull:
            self._on_failure(now, PAUSED.message, is_last)
            return True
        except sqlite3.OperationalError as error:  # such as a full disk
            self._on_failure(now, f"its results cannot be stored: {error}", is_last)
            return True
        del self._results[: len(results)]
        self._on_success(has_limit)
        if is_ours:
            self._on_stored(results)
        return is_ours

    def _on_failure(self, now: float, reason: str, is_last: bool) -> None:
        if is_last:
            log.warning("the batch %s loses %d results", self._batch.id, len(self._results))
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * float(1 << min(self._num_failures, 16)))
        self._retry_at = now + pause_s
        self._num_failures += 1
        if self._num_failures == 1:
            log.warning("the batch %s pauses: %s", self._batch.id, reason)

    def _on_success(self, has_limit: bool) -> None:
        if self.is_paused and has_limit:  # without a limit, the batch ends or stops
            log.info("the batch %s continues", self._batch.id)
        self._num_failures, self._retry_at = 0, 0.0


def _add_results(
    batch: StoredBatch, results: list[LineResult], has_limit: bool, database: BatchDatabase
) -> bool:
    return database.add_results(batch, results, has_limit=has_limit)
