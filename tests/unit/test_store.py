"""The database of the store: which records are kept, for how long and for whom, and how the runs of
a dead process end. Time is an argument, so no test waits."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.store.database import LEASE_S, SWEEP_EVERY_S, BrokenChain, Database
from gateway.store.queries import Interruption, NewRun, RunBatch, RunPage, StoredRecord

NOW = 1_000_000.0
MIB = 1 << 20


def interrupt(run: str, number: int, body: bytes | None) -> Interruption:
    return Interruption(b"%b died at %d" % (run.encode(), number), body and body + b" (died)")


def opened(path: Path, runner: str = "me", **options: Any) -> Database:
    bounds = {"max_bytes": 64 * MIB, "max_age_s": 1000.0} | options
    return Database(str(path), {"kind": interrupt}, runner=runner, **bounds)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "r.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = opened(path)
    yield database
    database.close()


@pytest.fixture
def other(path: Path, database: Database) -> Iterator[Database]:
    """Return the database of `database`, as another process opens it."""
    other = opened(path, "other")
    yield other
    other.close()


def record(
    name: str, previous: str | None = None, *, owner: str = "o", size: int = 10
) -> StoredRecord:
    return StoredRecord(name, owner, NOW, previous, b"[]", b"x" * size)


def batches(run: str, first: int, *frames: bytes, **options: Any) -> list[RunBatch]:
    return [RunBatch(run, first, list(frames), **options)]


def test_a_stored_response_is_read_by_its_owner_from_any_process(
    database: Database, other: Database
) -> None:
    database.put(record("a"), NOW)
    assert other.get("a", "o", NOW) == record("a")
    assert other.get("a", "somebody", NOW) is None
    assert not other.delete("a", "somebody")
    assert other.delete("a", "o")
    assert database.get("a", "o", NOW) is None


def test_a_chain_is_returned_in_order_and_counts_as_used(database: Database) -> None:
    database.put(record("a"), NOW)
    database.put(record("b", "a"), NOW)
    database.put(record("c", "b"), NOW)
    assert [r.id for r in database.chain("c", "o", NOW + 900)] == ["a", "b", "c"]
    database.put(record("unused"), NOW)
    database.put(record("new"), NOW + 1500)
    assert database.get("unused", "o", NOW + 1500) is None
    assert [r.id for r in database.chain("c", "o", NOW + 1500)] == ["a", "b", "c"]


def test_a_broken_chain_names_the_missing_response(database: Database) -> None:
    database.put(record("a"), NOW)
    database.put(record("b", "a"), NOW)
    database.delete("a", "o")
    with pytest.raises(BrokenChain) as broken:
        database.chain("b", "o", NOW)
    assert broken.value.missing == "a"


def test_a_response_that_is_unused_for_long_is_deleted(database: Database) -> None:
    database.put(record("old"), NOW)
    database.put(record("young"), NOW + SWEEP_EVERY_S + 900)
    database.put(record("last"), NOW + 2 * SWEEP_EVERY_S + 1000)
    kept = [n for n in ("old", "young", "last") if database.get(n, "o", NOW)]
    assert kept == ["young", "last"]


def test_the_file_has_a_size_and_the_least_used_make_room(path: Path) -> None:
    database = opened(path, max_bytes=2 * MIB)
    for n in range(100):
        database.put(record(f"r{n}", size=100_000), NOW + n)
    kept = [n for n in range(100) if database.get(f"r{n}", "o", NOW + 100)]
    assert kept == list(range(kept[0], 100)), "the oldest went, and only those"
    assert 5 <= len(kept) <= 20
    assert path.stat().st_size < 4 * MIB
    database.close()


def test_an_open_run_is_never_swept(path: Path) -> None:
    database = opened(path, max_bytes=MIB)
    database.start_run(NewRun("run", "o", "kind"), record("run", size=100_000), NOW)
    for n in range(30):
        database.put(record(f"r{n}", size=100_000), NOW + 1)
    assert database.get("run", "o", NOW + 1) is not None
    database.append(batches("run", 0, b"x", is_last=True, body=b"done"), NOW + 1, 60)
    for n in range(30):
        database.put(record(f"s{n}", size=100_000), NOW + 2)
    assert database.get("run", "o", NOW + 2) is None
    assert database.page("run", "o", -1, NOW + 2) is None
    database.close()


def test_a_run_is_read_in_pages_from_any_event(database: Database, other: Database) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run"), NOW)
    frames = [b"f%d" % n for n in range(10)]
    database.append(batches("run", 0, *frames[:6]), NOW, 60)
    assert other.page("run", "o", -1, NOW, limit=4) == RunPage(frames[:4], is_last=False)
    assert other.page("run", "o", 3, NOW, limit=4) == RunPage(frames[4:6], is_last=False)
    assert other.page("run", "o", 5, NOW) == RunPage([], is_last=False)
    assert other.page("run", "somebody", -1, NOW) is None
    database.append(batches("run", 6, *frames[6:], is_last=True, body=b"whole"), NOW, 60)
    assert other.page("run", "o", 5, NOW) == RunPage(frames[6:], is_last=True)
    assert other.page("run", "o", 9, NOW) == RunPage([], is_last=True)
    found = other.get("run", "o", NOW)
    assert found.body == b"whole"


def test_a_response_may_change_before_its_end(database: Database) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run"), NOW)
    database.append(batches("run", 0, body=b"in progress"), NOW, 60)
    found = database.get("run", "o", NOW)
    assert found.body == b"in progress"


def test_a_run_whose_lease_is_over_is_ended_by_any_reader(
    database: Database, other: Database
) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run", size=1), NOW)
    database.append(batches("run", 0, b"f0", b"f1"), NOW, 60)
    still = other.page("run", "o", -1, NOW + LEASE_S - 1)
    assert still == RunPage([b"f0", b"f1"], is_last=False)
    found = other.get("run", "o", NOW + LEASE_S + 1)
    assert found.body == b"x (died)"
    page = other.page("run", "o", 1, NOW + LEASE_S + 1)
    assert page == RunPage([b"run died at 2"], is_last=True)
    heard_more = other.page("run", "o", 7, NOW + LEASE_S + 1)
    assert heard_more == RunPage([b"run died at 2"], is_last=True)


def test_a_beat_keeps_it_alive(database: Database, other: Database) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run"), NOW)
    for beat in range(1, 5):
        assert set(database.renew_leases([], 0, NOW + beat * LEASE_S * 0.9)) == {"run"}
    page = other.page("run", "o", -1, NOW + 4 * LEASE_S)
    assert not page.is_last


def test_a_process_without_a_lease_writes_nothing_more(database: Database, other: Database) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run"), NOW)
    before = other.page("run", "o", -1, NOW + LEASE_S + 1)
    assert database.renew_leases([], 0, NOW + LEASE_S + 2) == {}
    late = batches("run", 0, b"late", is_last=True, body=b"late")
    assert database.append(late, NOW + LEASE_S + 2, 60) == ["run"]
    assert other.page("run", "o", -1, NOW + LEASE_S + 2) == before
    assert other.append(batches("run", 5, b"not mine"), NOW, 60) == ["run"]


def test_a_cancellation_by_another_process_arrives_with_the_next_renewal(
    database: Database, other: Database
) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run"), NOW)
    other.cancel("run", "somebody")
    assert not database.renew_leases([], 0, NOW)["run"].is_cancelled
    other.cancel("run", "o")
    assert database.renew_leases([], 0, NOW)["run"].is_cancelled
    assert other.renew_leases([], 0, NOW) == {}, "it is not theirs"


def test_a_run_that_needs_a_listener_is_wanted_while_somebody_listens(
    database: Database, other: Database
) -> None:
    database.start_run(NewRun("run", "o", "kind", wanted_until=NOW + 5), None, NOW)
    assert database.renew_leases(["run"], NOW + 10, NOW + 1)["run"].wanted_until == NOW + 10
    other.want("run", NOW + 7)
    assert database.renew_leases([], 0, NOW + 2)["run"].wanted_until == NOW + 10
    other.want("run", NOW + 12)
    assert database.renew_leases([], 0, NOW + 3)["run"].wanted_until == NOW + 12


def test_a_response_needs_no_listener(database: Database) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run"), NOW)
    database.want("run", NOW + 1)
    assert database.renew_leases(["run"], NOW + 1, NOW)["run"].wanted_until is None


def test_a_stream_without_a_response_is_gone_after_its_window(
    path: Path, database: Database
) -> None:
    database.start_run(NewRun("run", "o", "kind", wanted_until=NOW + 5), None, NOW)
    database.append(batches("run", 0, b"f0", is_last=True), NOW, 60)
    assert database.page("run", "o", -1, NOW + 59) is not None
    database.want("run", NOW + 100)
    assert database.page("run", "o", -1, NOW + 99) is not None
    assert database.page("run", "o", -1, NOW + 101) is None
    database.put(record("a"), NOW + SWEEP_EVERY_S + 101)
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT COUNT(*) FROM events").fetchone()
    assert rows == (0,)


def test_a_response_that_is_deleted_takes_its_run_with_it(
    database: Database, other: Database
) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run"), NOW)
    database.append(batches("run", 0, b"f0"), NOW, 60)
    other.delete("run", "o")
    assert database.renew_leases([], 0, NOW) == {}
    assert database.page("run", "o", -1, NOW) is None


def test_a_failed_write_changes_nothing(database: Database) -> None:
    database.start_run(NewRun("run", "o", "kind"), record("run"), NOW)
    database.append(batches("run", 0, b"f0"), NOW, 60)
    with pytest.raises(sqlite3.IntegrityError):
        database.append(batches("run", 0, b"f0 again", is_last=True, body=b"y"), NOW, 60)
    assert database.page("run", "o", -1, NOW) == RunPage([b"f0"], is_last=False)
    assert database.get("run", "o", NOW) == record("run")


def test_a_file_of_another_version_is_refused(path: Path, database: Database) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        opened(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "r.db"
    broken.write_bytes(b"no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        opened(broken)
