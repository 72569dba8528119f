"""Results on their way to the store: kept and tried again while there is no room. Time is an
argument."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from gateway.api.batches.result_buffer import MAX_PAUSE_S, ResultBuffer
from gateway.store.batch_database import BatchDatabase, LineResult
from gateway.store.batch_queries import StoredBatch
from gateway.store.batch_states import BatchEvent
from gateway.store.sqlite_file import Store
from tests.unit.test_batch_database import DAY_S, NOW, put_batch, put_file

MIB = 1 << 20
NO_LIMIT = 1 << 30
T = TypeVar("T")


class FillableDatabase(BatchDatabase):
    """A database on a disk that can be full."""

    def limit_pages(self, count: int) -> None:
        self._connection.execute(f"PRAGMA max_page_count = {count}").fetchall()


class CountingStore(Store[BatchDatabase]):
    """A store that counts the attempts to use it, and its errors of SQLite."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            lambda: FillableDatabase(str(path), max_bytes=MIB, max_age_s=30 * DAY_S, runner="me"),
            str(path),
            option="--file-store",
        )
        self.num_calls = 0
        self.errors: list[sqlite3.Error] = []

    def call(self, work: Callable[[BatchDatabase], T]) -> T:
        self.num_calls += 1
        try:
            return super().call(work)
        except sqlite3.Error as error:
            self.errors.append(error)
            raise

    def set_disk_pages(self, count: int | None) -> None:
        """Limit the file, as a full disk does. None: there is room again."""

        def limit(database: BatchDatabase) -> None:
            assert isinstance(database, FillableDatabase)
            database.limit_pages(NO_LIMIT if count is None else count)

        self.call(limit)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    store = CountingStore(tmp_path / "files.db")
    yield store
    store.close()


@pytest.fixture
def batch(store: CountingStore) -> StoredBatch:
    """A batch that is computed by this process."""

    def create(database: BatchDatabase) -> StoredBatch:
        put_file(database)
        put_batch(database)
        claimed = database.claim(NOW)
        assert claimed is not None
        database.set_total(claimed.id, 100)
        database.move(claimed, BatchEvent.VALID, NOW)
        return claimed

    return store.call(create)


def buffer_of(
    store: CountingStore, batch: StoredBatch, counted: list[int] | None = None
) -> ResultBuffer:
    """Return a buffer that adds the numbers of the lines that it stores to `counted`."""
    numbers = [] if counted is None else counted
    return ResultBuffer(store, batch, lambda stored: numbers.extend(r.number for r in stored))


def add(buffer: ResultBuffer, *numbers: int, size: int = 10_000) -> None:
    for number in numbers:
        buffer.add(LineResult(number, b"%d" % number + b"x" * size, has_failed=False))


def stored(store: CountingStore, batch: StoredBatch) -> list[int]:
    return sorted(store.call(lambda database: database.done_lines(batch)))


def test_a_full_disk_loses_and_doubles_no_result(store: CountingStore, batch: StoredBatch) -> None:
    counted: list[int] = []
    buffer = buffer_of(store, batch, counted)
    store.set_disk_pages(1)  # SQLite takes the present size if it is larger
    add(buffer, 1, 2)
    assert buffer.flush(0.0)
    assert "its disk is full" in str(store.errors[0])
    add(buffer, 3)
    assert (buffer.is_paused, buffer.is_empty) == (True, False)
    assert stored(store, batch) == counted == []
    store.set_disk_pages(None)
    assert buffer.flush(MAX_PAUSE_S)
    assert (buffer.is_paused, buffer.is_empty) == (False, True)
    assert stored(store, batch) == counted == [1, 2, 3]
    found = store.call(lambda database: database.get_batch(batch.id, batch.owner))
    assert found is not None
    assert found.num_completed == 3


def test_attempts_on_a_full_disk_become_rare(store: CountingStore, batch: StoredBatch) -> None:
    buffer = buffer_of(store, batch)
    store.set_disk_pages(1)
    add(buffer, 1)
    before = store.num_calls
    for tenth in range(600):  # a minute
        buffer.flush(tenth / 10)
    assert 5 <= store.num_calls - before <= 12
    store.set_disk_pages(None)
    assert buffer.flush(60.0, is_last=True), "the last attempt does not wait"
    assert stored(store, batch) == [1]


def test_a_full_store_pauses_the_batch_until_the_limit_is_lifted(
    store: CountingStore, batch: StoredBatch
) -> None:
    buffer = buffer_of(store, batch)
    add(buffer, 1, size=2 * MIB)
    assert buffer.flush(0.0), "the limit holds for what is stored already"
    add(buffer, 2)
    assert buffer.flush(1.0)
    assert buffer.is_paused
    found = store.call(lambda database: database.get_batch(batch.id, batch.owner))
    assert found is not None
    assert found.is_paused
    assert buffer.flush(100.0, has_limit=False)
    assert not buffer.is_paused
    assert stored(store, batch) == [1, 2]


def test_the_results_of_a_lost_batch_are_not_stored(
    store: CountingStore, batch: StoredBatch
) -> None:
    buffer = buffer_of(store, batch)
    add(buffer, 1)
    store.call(lambda database: database.release(batch.id))
    assert not buffer.flush(0.0)
    assert stored(store, batch) == []
