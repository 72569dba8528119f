"""The database of files and batches: states, leases, results, bounds. Time is an argument, so no
test waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.store.batch_database import (
    LEASE_S,
    OUTPUT_PURPOSE,
    SWEEP_EVERY_S,
    SWEEP_FILES,
    UPLOAD_S,
    BatchDatabase,
    FileInUse,
    LineResult,
    LinesMissing,
    StoreFull,
    TooMany,
    UnknownId,
)
from gateway.store.batch_queries import NewBatch, NewFile, StoredBatch
from gateway.store.batch_states import FINAL, BatchEvent, BatchStatus, CannotCancel

NOW = 1_000_000.0
DAY_S = 86400.0
MIB = 1 << 20
OWNER = "o"


def opened(path: Path, runner: str = "me", max_bytes: int = 64 * MIB) -> BatchDatabase:
    return BatchDatabase(str(path), max_bytes=max_bytes, max_age_s=30 * DAY_S, runner=runner)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "files.db"


@pytest.fixture
def database(path: Path) -> Iterator[BatchDatabase]:
    with closing(opened(path)) as database:
        yield database


@pytest.fixture
def other(path: Path, database: BatchDatabase) -> Iterator[BatchDatabase]:
    """Return the database of `database`, as another process opens it."""
    with closing(opened(path, "other")) as other:
        yield other


def put_file(
    database: BatchDatabase,
    name: str = "file-in",
    *pieces: bytes,
    owner: str = OWNER,
    expires_at: float = NOW + 30 * DAY_S,
    now: float = NOW,
) -> None:
    database.begin_file(NewFile(name, owner, "batch", f"{name}.jsonl"), 100, now)
    for number, piece in enumerate(pieces):
        database.add_piece(name, number, piece)
    assert database.finish_file(name, owner, expires_at, now) is not None


def put_batch(database: BatchDatabase, name: str = "batch_1", **changes: Any) -> StoredBatch | None:
    fields: dict[str, Any] = {
        "owner": OWNER,
        "caller": "alice",
        "endpoint": "/v1/completions",
        "input_file": "file-in",
        "output_file": f"{name}-out",
        "error_file": f"{name}-err",
        "window": "24h",
        "metadata": b'{"a":"b"}',
        "output_s": DAY_S,
        "expires_at": NOW + DAY_S,
    }
    return database.create_batch(NewBatch(name, **(fields | changes)), 3, NOW)


@pytest.fixture
def batch(database: BatchDatabase) -> StoredBatch:
    """A batch with three lines that `database` executes."""
    put_file(database)
    put_batch(database)
    claimed = database.claim(NOW)
    assert claimed is not None
    database.set_total(claimed.id, 3)
    assert database.move(claimed, BatchEvent.VALID, NOW + 1) is BatchStatus.IN_PROGRESS
    return claimed


def results(*numbers: int, failed: bool = False) -> list[LineResult]:
    return [LineResult(n, b"line %d\n" % n, failed) for n in numbers]


def state(database: BatchDatabase) -> StoredBatch:
    found = database.get_batch("batch_1", OWNER)
    assert found is not None
    return found


# ---- the table


def test_a_batch_ends_in_one_of_four_statuses() -> None:
    assert sorted(FINAL) == ["cancelled", "completed", "expired", "failed"]


# ---- files


def test_a_file_is_hidden_until_all_of_it_is_stored(database: BatchDatabase) -> None:
    database.begin_file(NewFile("f", OWNER, "batch", "a.jsonl"), 1, NOW)
    database.add_piece("f", 0, b"abc")
    assert database.get_file("f", OWNER, NOW) is None
    assert database.list_files(OWNER, None, "", 9, NOW, ascending=True) == []
    file = database.finish_file("f", OWNER, NOW + 9, NOW)
    assert (file.bytes, file.expires_at) == (3, NOW + 9)
    assert database.get_file("f", "somebody", NOW) is None
    assert database.get_file("f", OWNER, NOW + 9) is None, "it has expired"


def test_a_file_is_read_in_pages(database: BatchDatabase) -> None:
    put_file(database, "f", b"a", b"b", b"c")
    assert database.pieces("f", -1, 2) == [(0, b"a"), (1, b"b")]
    assert database.pieces("f", 1, 2) == [(2, b"c")]


def test_a_page_of_a_file_is_bounded_by_its_bytes(database: BatchDatabase) -> None:
    put_file(database, "f", *(bytes(1000) for _ in range(9)))
    assert [number for number, _ in database.pieces("f", -1, 2500)] == [0, 1, 2]
    assert [number for number, _ in database.pieces("f", 2, 1)] == [3]
    assert len(database.pieces("f", 3, 1 << 30)) == 5


def test_an_abandoned_upload_leaves_nothing(database: BatchDatabase) -> None:
    database.begin_file(NewFile("f", OWNER, "batch", "a"), 1, NOW)
    database.add_piece("f", 0, b"abc")
    database.abandon_file("f")
    assert database.pieces("f", -1, 9) == []
    assert database.finish_file("f", OWNER, NOW, NOW) is None
    with pytest.raises(UnknownId):
        database.add_piece("f", 1, b"d")


def test_files_and_bytes_are_bounded(path: Path) -> None:
    with closing(opened(path, max_bytes=MIB)) as database:
        put_file(database, "a", bytes(MIB // 2))
        with pytest.raises(TooMany):
            database.begin_file(NewFile("b", OWNER, "batch", "b"), 1, NOW)
        database.begin_file(NewFile("b", "other", "batch", "b"), 1, NOW)
        with pytest.raises(StoreFull):
            database.add_piece("b", 0, bytes(MIB // 2))
        assert database.delete_file("a", OWNER, NOW)
        database.add_piece("b", 0, bytes(MIB // 2))


def test_a_full_store_takes_no_batches(path: Path) -> None:
    with closing(opened(path)) as database:
        put_file(database, "file-in", bytes(MIB))
    with closing(opened(path, max_bytes=MIB)) as database:
        with pytest.raises(StoreFull):
            put_batch(database)
        assert database.list_batches(OWNER, None, 9) == []
        files = database.list_files(OWNER, None, "", 9, NOW, ascending=True)
        assert [file.id for file in files] == ["file-in"]


def test_expired_files_and_forgotten_uploads_are_deleted(database: BatchDatabase) -> None:
    put_file(database, "short", b"x", expires_at=NOW + 10)
    put_file(database, "long", b"x")
    database.begin_file(NewFile("upload", OWNER, "batch", "u"), 9, NOW)
    database.add_piece("upload", 0, b"x")
    later = NOW + UPLOAD_S + SWEEP_EVERY_S + 1
    put_file(database, "new", b"x", now=later)
    left = [name for name in ("short", "long", "upload", "new") if database.pieces(name, -1, 1)]
    assert left == ["long", "new"]


def test_many_expired_files_are_deleted_without_waiting_for_the_next_sweep(
    database: BatchDatabase,
) -> None:
    names = [f"file-{number}" for number in range(2 * SWEEP_FILES + 1)]
    for name in names:
        database.begin_file(NewFile(name, OWNER, "batch", "u"), 1000, NOW)
        database.add_piece(name, 0, b"x")
    later = NOW + UPLOAD_S + SWEEP_EVERY_S + 1
    for _ in range(3):
        database.claim(later)
    assert [name for name in names if database.pieces(name, -1, 1)] == []


def test_the_input_of_an_open_batch_is_kept_although_it_has_expired(
    database: BatchDatabase,
) -> None:
    put_file(database, "file-in", b"x", expires_at=NOW + 10)
    put_batch(database)
    with pytest.raises(FileInUse, match="batch_1"):
        database.delete_file("file-in", OWNER, NOW)
    database.claim(NOW + 2 * SWEEP_EVERY_S)
    assert database.pieces("file-in", -1, 1) == [(0, b"x")]


# ---- batches


def test_a_batch_runs_from_validating_to_completed(
    database: BatchDatabase, batch: StoredBatch
) -> None:
    assert database.add_results(batch, results(1, 3))
    assert database.add_results(batch, results(2, failed=True))
    found = state(database)
    assert (found.num_total, found.num_completed, found.num_failed) == (3, 2, 1)
    assert (found.has_output, found.has_errors) == (False, False), "hidden until the end"
    assert database.move(batch, BatchEvent.ALL_DONE, NOW + 2) is BatchStatus.FINALIZING
    assert database.move(batch, BatchEvent.PUBLISHED, NOW + 3) is BatchStatus.COMPLETED
    found = state(database)
    assert (found.has_output, found.has_errors) == (True, True)
    assert msgspec.json.decode(found.changed_at) == {
        "in_progress": NOW + 1,
        "finalizing": NOW + 2,
        "completed": NOW + 3,
    }
    assert database.pieces(batch.output_file, -1, 9) == [(1, b"line 1\n"), (3, b"line 3\n")]
    output = database.get_file(batch.output_file, OWNER, NOW + 3)
    assert (output.purpose, output.bytes, output.expires_at) == (
        OUTPUT_PURPOSE,
        14,
        NOW + 3 + DAY_S,
    )
    assert database.claim(NOW + 10 * DAY_S) is None


def test_a_batch_with_missing_results_cannot_end(
    database: BatchDatabase, batch: StoredBatch
) -> None:
    database.add_results(batch, results(1, 2))
    for event in (BatchEvent.ALL_DONE, BatchEvent.WINDOW_OVER):
        with pytest.raises(LinesMissing):
            database.move(batch, event, NOW + 2)
    assert state(database).status is BatchStatus.IN_PROGRESS
    database.add_results(batch, results(3))
    assert database.move(batch, BatchEvent.ALL_DONE, NOW + 2) is BatchStatus.FINALIZING


def test_an_empty_output_file_is_never_visible(database: BatchDatabase, batch: StoredBatch) -> None:
    database.add_results(batch, results(1, 2, 3))
    for event in (BatchEvent.ALL_DONE, BatchEvent.PUBLISHED):
        database.move(batch, event, NOW + 2)
    assert not state(database).has_errors
    assert database.get_file(batch.error_file, OWNER, NOW + 2) is None


def test_a_line_cannot_have_two_results(database: BatchDatabase, batch: StoredBatch) -> None:
    database.add_results(batch, results(1))
    with pytest.raises(Exception, match="UNIQUE constraint"):
        database.add_results(batch, results(2, 1))
    assert database.done_lines(batch) == {1}, "all or nothing"
    assert state(database).num_completed == 1


def test_one_process_holds_a_batch_and_another_takes_over_when_its_lease_ends(
    database: BatchDatabase, other: BatchDatabase, batch: StoredBatch
) -> None:
    database.add_results(batch, results(1))
    assert other.claim(NOW + LEASE_S - 1) is None
    assert database.renew(NOW + LEASE_S - 1) == {"batch_1": BatchStatus.IN_PROGRESS}
    assert other.claim(NOW + 2 * LEASE_S - 2) is None
    taken = other.claim(NOW + 2 * LEASE_S)
    assert taken is not None
    assert taken.status is BatchStatus.IN_PROGRESS
    assert other.done_lines(taken) == {1}
    assert database.renew(NOW + 2 * LEASE_S) == {}
    assert not database.add_results(batch, results(2)), "lost"
    assert database.move(batch, BatchEvent.ALL_DONE, NOW) is None
    database.set_total("batch_1", 99)
    database.set_errors("batch_1", b"[]")
    database.release("batch_1")
    assert other.add_results(taken, results(2))
    assert state(other).num_total == 3
    assert state(other).errors is None
    assert other.done_lines(taken) == {1, 2}


def test_a_released_batch_is_claimed_at_once(
    database: BatchDatabase, other: BatchDatabase, batch: StoredBatch
) -> None:
    database.release("batch_1")
    assert other.claim(NOW) is not None


def test_a_batch_is_cancelled_by_any_process_and_ended_by_its_own(
    database: BatchDatabase, other: BatchDatabase, batch: StoredBatch
) -> None:
    assert not other.cancel_batch("batch_1", "somebody", NOW)
    assert other.cancel_batch("batch_1", OWNER, NOW + 2)
    assert other.cancel_batch("batch_1", OWNER, NOW + 3), "a second time changes nothing"
    assert database.renew(NOW + 3) == {"batch_1": BatchStatus.CANCELLING}
    assert database.add_results(batch, results(2)), "what is done is kept"
    assert database.move(batch, BatchEvent.ALL_DONE, NOW + 3) is None
    assert database.move(batch, BatchEvent.PUBLISHED, NOW + 4) is BatchStatus.CANCELLED
    assert state(database).has_output
    with pytest.raises(CannotCancel, match="a batch that is cancelled cannot be cancelled"):
        database.cancel_batch("batch_1", OWNER, NOW + 5)


def test_batches_are_listed_in_pages_of_their_owner(database: BatchDatabase) -> None:
    put_file(database)
    for number in range(3):
        put_batch(database, f"batch_{number}")
    assert [b.id for b in database.list_batches(OWNER, None, 2)] == ["batch_2", "batch_1"]
    assert [b.id for b in database.list_batches(OWNER, "batch_1", 2)] == ["batch_0"]
    assert database.list_batches("somebody", None, 9) == []
    with pytest.raises(UnknownId):
        database.list_batches("somebody", "batch_1", 9)


def test_a_batch_needs_an_input_file_of_its_owner(database: BatchDatabase) -> None:
    assert put_batch(database) is None
    put_file(database)
    assert put_batch(database, owner="somebody") is None
    assert put_batch(database) is not None


def test_open_batches_are_bounded(database: BatchDatabase) -> None:
    put_file(database)
    for number in range(3):
        put_batch(database, f"batch_{number}")
    with pytest.raises(TooMany):
        put_batch(database, "batch_3")
    claimed = database.claim(NOW)
    assert claimed is not None
    database.move(claimed, BatchEvent.INVALID, NOW)
    assert put_batch(database, "batch_3") is not None


def test_old_batches_are_deleted_with_their_files(
    database: BatchDatabase, batch: StoredBatch
) -> None:
    database.add_results(batch, results(1, 2, 3))
    for event in (BatchEvent.ALL_DONE, BatchEvent.PUBLISHED):
        database.move(batch, event, NOW + 2)
    database.claim(NOW + 2 * DAY_S)
    assert database.pieces(batch.output_file, -1, 1) == []
    assert state(database).status is BatchStatus.COMPLETED
    database.claim(NOW + 31 * DAY_S)
    assert database.get_batch("batch_1", OWNER) is None


def test_a_batch_is_kept_for_its_time_after_its_end(
    database: BatchDatabase, batch: StoredBatch
) -> None:
    """Its client learns the ids of its output files from it."""
    ended_at = NOW + 31 * DAY_S
    database.add_results(batch, results(1, 2, 3))
    database.move(batch, BatchEvent.WINDOW_OVER, ended_at)
    database.claim(ended_at + 2 * SWEEP_EVERY_S)
    assert (state(database).status, state(database).has_output) == (BatchStatus.EXPIRED, True)
    database.claim(ended_at + 31 * DAY_S)
    assert database.get_batch("batch_1", OWNER) is None


def test_an_owner_with_many_batches_does_not_delay_another(database: BatchDatabase) -> None:
    put_file(database)
    put_file(database, "file-other", owner="other")
    for name in ("a1", "a2", "a3"):
        put_batch(database, name)
    put_batch(database, "b1", owner="other", input_file="file-other")
    claimed = [batch.id for _ in range(5) if (batch := database.claim(NOW)) is not None]
    assert claimed == ["a1", "b1", "a2", "a3"]
    later = NOW + LEASE_S + 1
    assert [each.id for _ in range(2) if (each := database.claim(later))] == ["a1", "b1"]


def test_the_facts_count_open_batches_by_status(
    database: BatchDatabase, batch: StoredBatch
) -> None:
    put_batch(database, "batch_2")
    facts = database.facts()
    assert facts.open_batches == {
        BatchStatus.VALIDATING: 1,
        BatchStatus.IN_PROGRESS: 1,
        BatchStatus.FINALIZING: 0,
        BatchStatus.CANCELLING: 0,
    }
    assert database.add_results(batch, results(1, 2, 3))
    database.move(batch, BatchEvent.ALL_DONE, NOW)
    database.move(batch, BatchEvent.PUBLISHED, NOW)
    assert sum(database.facts().open_batches.values()) == 1
    put_file(database, "large", bytes(MIB))
    assert facts.num_bytes < MIB < database.facts().num_bytes
