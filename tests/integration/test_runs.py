"""Runs and their flusher with a real database file, in the gevent hub of the test process."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest

from gateway.store.database import Database
from gateway.store.queries import Interruption, NewRun, StoredRecord
from gateway.store.runs import DetachedRun, Runs
from gateway.store.sqlite_file import Store
from tests.support.waiting import eventually

RunStore = Store[Database]


def interrupt(run: str, number: int, body: bytes | None) -> Interruption:
    return Interruption(b"died", b"died")


class RunClient:
    """A client that stores what it receives."""

    def __init__(self) -> None:
        self.data = b""
        self.is_finished = False

    def write(self, data: bytes) -> None:
        assert not self.is_finished
        self.data += data

    def finish(self) -> None:
        assert not self.is_finished
        self.is_finished = True


class LimitedDatabase(Database):
    """A database whose size a test can limit."""

    def limit_pages(self, pages: int) -> None:
        """Limit the size of the file, as a full disk does. If the file has more than `pages` pages,
        its present size is the limit."""
        self._connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "r.db")


@pytest.fixture
def store(path: str) -> Iterator[RunStore]:
    bounds: dict[str, Any] = {"max_bytes": 1 << 30, "max_age_s": 1e6}
    store: RunStore = Store(
        partial(LimitedDatabase, path, {"kind": interrupt}, **bounds),
        path,
        option="--response-store",
    )
    yield store
    store.close()


@pytest.fixture
def runs(store: RunStore) -> Runs:
    return Runs(store, window_s=0.2)


def begun(runs: Runs, name: str = "run", **options: Any) -> tuple[DetachedRun, list[str]]:
    """Start a run. Return it, and a list to which each abort adds the run's name. An abort ends the
    run at once."""
    record = StoredRecord(name, "o", time.time(), None, b"[]", b"queued")
    run = runs.start(NewRun(name, "o", "kind", **options), record)
    aborts: list[str] = []

    def abort() -> None:
        aborts.append(name)
        run.close([b"aborted"], b"aborted")

    run.abort = abort
    return run, aborts


def stored(store: RunStore, name: str = "run") -> tuple[list[bytes], bytes]:
    now = time.time()
    page = store.call(lambda database: database.page(name, "o", -1, now))
    record = store.call(lambda database: database.get(name, "o", now))
    assert page is not None
    assert record is not None
    return page.frames, record.body


def reach(claim: Callable[[], object]) -> None:
    assert eventually(claim, pause=gevent.sleep)


def await_beats(path: str, count: int, name: str = "run") -> None:
    """Wait until the run's lease has been renewed `count` times."""

    def lease_until() -> float:
        with closing(sqlite3.connect(path)) as connection:
            query = "SELECT lease_until FROM runs WHERE id = ?"
            ((until,),) = connection.execute(query, [name]).fetchall()
            return until

    for _ in range(count):
        before = lease_until()
        reach(lambda: lease_until() > before)  # noqa: B023 (called at once)


def test_events_of_a_run_are_stored_and_its_client_gets_each_once(
    store: RunStore, runs: Runs
) -> None:
    run, aborts = begun(runs)
    client = RunClient()
    run.write([b"a", b"b"])
    reach(lambda: len(stored(store)[0]) == 2)
    run.attach(client)  # type: ignore[arg-type]
    assert client.data == b"ab", "earlier frames are received, too"
    run.write([b"c"])
    assert client.data == b"abc", "at once"
    run.set_body(b"in progress")
    reach(lambda: stored(store)[1] == b"in progress")
    run.close([b"d"], b"done")
    assert client.data == b"abc", "the last word waits for the store"
    reach(lambda: client.is_finished)
    assert client.data == b"abcd"
    assert stored(store) == ([b"a", b"b", b"c", b"d"], b"done")
    assert len(runs) == 0
    assert aborts == []


def test_a_client_that_connects_after_the_end_receives_all(store: RunStore, runs: Runs) -> None:
    run, _ = begun(runs)
    run.write([b"a"])
    run.close([b"b"], b"done")
    reach(lambda: run.is_over)
    client = RunClient()
    run.attach(client)  # type: ignore[arg-type]
    assert (client.data, client.is_finished) == (b"ab", True)


def test_a_run_continues_after_its_client_left(path: str, store: RunStore, runs: Runs) -> None:
    run, aborts = begun(runs)
    client = RunClient()
    run.attach(client)  # type: ignore[arg-type]
    run.detach()
    await_beats(path, 2)
    run.write([b"a"])
    run.close([], b"done")
    reach(lambda: run.is_over)
    assert (client.data, client.is_finished) == (b"", False)
    assert stored(store) == ([b"a"], b"done")
    assert aborts == []


def test_one_that_needs_a_client_is_aborted_without_one(
    path: str, store: RunStore, runs: Runs
) -> None:
    run, aborts = begun(runs, wanted_until=time.time() + 0.2)
    client = RunClient()
    run.attach(client)  # type: ignore[arg-type]
    await_beats(path, 3)
    assert aborts == [], "its client is there"
    run.detach()
    reach(lambda: run.is_over)
    assert aborts == ["run"]
    assert stored(store) == ([b"aborted"], b"aborted")


def test_a_cancelled_run_is_aborted(store: RunStore, runs: Runs) -> None:
    run, aborts = begun(runs)
    store.call(lambda database: database.cancel("run", "o"))
    reach(lambda: run.is_over)
    assert aborts == ["run"]


def test_a_deleted_or_expired_run_is_aborted_and_writes_nothing_more(
    store: RunStore, runs: Runs
) -> None:
    deleted, _ = begun(runs, "deleted")
    dead, _ = begun(runs, "dead")
    client = RunClient()
    dead.attach(client)  # type: ignore[arg-type]
    store.call(lambda database: database.delete("deleted", "o"))
    store.call(lambda database: database.get("dead", "o", time.time() + 3600))
    dead.write([b"too late"])
    reach(lambda: deleted.is_over and dead.is_over)
    assert len(runs) == 0
    assert stored(store, "dead") == ([b"died"], b"died")
    assert client.is_finished


def test_runs_that_cannot_be_written_down_are_aborted_and_later_ones_are_not(
    store: RunStore, runs: Runs
) -> None:
    run, aborts = begun(runs)
    client = RunClient()
    run.attach(client)  # type: ignore[arg-type]
    store.call(lambda database: database.limit_pages(1))  # type: ignore[attr-defined]
    run.write([b"a" * (1 << 20)])
    reach(lambda: run.is_over)
    assert aborts == ["run"]
    assert client.is_finished
    assert len(runs) == 0
    store.call(lambda database: database.limit_pages(1 << 30))  # type: ignore[attr-defined]
    later, aborts = begun(runs, "later")
    later.close([b"x"], b"done")
    reach(lambda: later.is_over)
    assert stored(store, "later") == ([b"x"], b"done")
    assert aborts == []
