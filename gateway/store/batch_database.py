"""The database of files and batches. Invariants:

- A file becomes visible in one step, when all of it is stored. The content of a visible file never
  changes.
- Only the process that holds a batch's lease stores its results and changes its status, except that
  any process may cancel it. A process whose lease has ended and was taken over stores nothing more.
- Each line of a batch has at most one result, because a result's number is that of its line.
- The output files of a batch become visible in the transaction that gives it its last status.
- A file that an open batch reads is not deleted.
- If the database is full, uploads, new batches and results are refused. Results are stored anyway
  if the window of their batch has ended, so that the batch can end.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.store import batch_queries as queries
from gateway.store.batch_queries import NewBatch, NewFile, StoredBatch, StoredFile
from gateway.store.batch_states import (
    BATCH_MACHINE,
    FINAL,
    BatchEvent,
    BatchStatus,
    CannotCancel,
)
from gateway.store.sqlite_file import SqliteFile

LEASE_S = 10.0
"""Time after which another process may take over a batch whose lease was not renewed."""
SWEEP_EVERY_S = 60.0
"""Interval at which files and batches that have expired are deleted."""
SWEEP_FILES = 64
"""Number of files that are deleted at once, so that other processes can write in between."""
UPLOAD_S = 3600.0
"""Time after which an upload that is not complete is deleted."""
NEEDS_ALL = (BatchEvent.ALL_DONE, BatchEvent.WINDOW_OVER)
"""Events after which each line has a result."""
INPUT_PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
PURPOSES = (INPUT_PURPOSE, "vision", "user_data")
"""Purposes of uploaded files. Those after the first are for images; either name serves."""


class StoreFull(Exception):
    """The database has reached its size limit."""


class TooMany(Exception):
    """The owner has as many files or open batches as are allowed."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class FileInUse(Exception):
    """An open batch reads the file."""

    def __init__(self, batch: str) -> None:
        super().__init__(batch)
        self.batch = batch


class UnknownId(Exception):
    """There is no file or batch with this id."""


class LinesMissing(Exception):
    """A batch has lines without a result."""


class LineResult(msgspec.Struct, frozen=True):
    """The result of a line, to be stored."""

    number: int
    #: The line of the output or error file.
    data: bytes
    has_failed: bool


class StoreFacts(msgspec.Struct, frozen=True):
    """What the metrics report about the database."""

    #: Numbers of batches by status; those of final statuses are absent.
    open_batches: dict[BatchStatus, int]
    num_bytes: int


class BatchDatabase(SqliteFile):
    """The open database file. The arguments `now` are seconds since 1970.

    max_bytes   size from which uploads, new batches and results are refused
    max_age_s   time after its end at which a batch is deleted
    runner      unique name of this process; "": a new name
    """

    def __init__(self, path: str, *, max_bytes: int, max_age_s: float, runner: str = "") -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._runner = runner or f"{os.getpid()}-{uuid.uuid4().hex}"
        self._swept_at = 0.0
        super().__init__(path, queries.SCHEMA, queries.VERSION)

    # ---- files

    def begin_file(self, file: NewFile, max_files: int, now: float) -> None:
        """Store a file without content. It is hidden until `finish_file`. Raises TooMany if its
        owner has `max_files` already, and StoreFull."""
        self._sweep(now)
        with self._writing():
            (count,) = self._one(queries.NUM_FILES, file.owner, OUTPUT_PURPOSE) or (0,)
            if count >= max_files:
                raise TooMany(max_files)
            self._check_room(0)
            self._put_file(file, now)

    def add_piece(self, file: str, number: int, data: bytes) -> None:
        """Store the next piece of a file. Raises StoreFull, and UnknownId if the file was deleted
        because its upload took longer than UPLOAD_S."""
        with self._writing():
            if self._one(queries.IS_FILE, file) is None:
                raise UnknownId
            self._check_room(len(data))
            self._execute(queries.PUT_PIECE, file, number, data)
            self._execute(queries.ADD_BYTES, file, len(data))

    def finish_file(
        self,
        file: str,
        owner: str,
        expires_at: float,
        now: float,
        purpose: str = INPUT_PURPOSE,
    ) -> StoredFile | None:
        """Make a file visible until `expires_at`, and return it; None if it was deleted in the
        meantime."""
        with self._writing():
            self._execute(queries.SHOW_FILE, file, expires_at, purpose)
        return self.get_file(file, owner, now)

    def abandon_file(self, file: str) -> None:
        """Delete a file that is not complete."""
        with self._writing():
            self._remove_file(file)

    def get_file(self, file: str, owner: str, now: float) -> StoredFile | None:
        """Return a visible file; None if `owner` has no such file."""
        row = self._one(queries.GET_FILE, file, owner, now)
        return StoredFile(*row) if row else None

    def list_files(
        self,
        owner: str,
        after: str | None,
        purpose: str,
        limit: int,
        now: float,
        *,
        ascending: bool,
    ) -> list[StoredFile]:
        """Return up to `limit` files, after the file `after`, in the order in which they were
        created or in reverse. Raises UnknownId."""
        start = self._seq(queries.FILE_SEQ, after, owner)
        statement = queries.list_files(is_ascending=ascending)
        rows = self._connection.execute(statement, (owner, now, start, purpose, limit))
        return [StoredFile(*row) for row in rows]

    def delete_file(self, file: str, owner: str, now: float) -> bool:
        """Delete a file. Return False if `owner` has no such file. Raises FileInUse."""
        with self._writing():
            if self.get_file(file, owner, now) is None:
                return False
            if (used := self._one(queries.USED_BY_BATCH, file)) is not None:
                raise FileInUse(used[0])
            self._remove_file(file)
        return True

    def pieces(self, file: str, after: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Return the next pieces of a file, as (number, data), after the number `after`: as many as
        have `max_bytes` in total, and at least one. The result is empty at the end of the file."""
        found: list[tuple[int, bytes]] = []
        num_bytes = 0
        with contextlib.closing(
            self._connection.execute(queries.GET_PIECES, (file, after))
        ) as rows:  # closed early, it reads no further pieces
            for number, data in rows:
                found.append((number, data))
                num_bytes += len(data)
                if num_bytes >= max_bytes:
                    break
        return found

    # ---- batches, for their owners

    def create_batch(self, batch: NewBatch, max_open: int, now: float) -> StoredBatch | None:
        """Store a new batch and its output files, which stay hidden until it ends. Return None if
        its owner has no such input file. Raises TooMany if its owner has `max_open` open
        batches, and StoreFull."""
        self._sweep(now)
        with self._writing():
            (count,) = self._one(queries.NUM_OPEN, batch.owner) or (0,)
            if count >= max_open:
                raise TooMany(max_open)
            self._check_room(0)
            source = self.get_file(batch.input_file, batch.owner, now)
            if source is None or source.purpose != INPUT_PURPOSE:
                return None
            for name, kind in ((batch.output_file, "output"), (batch.error_file, "error")):
                filename = f"{batch.id}_{kind}.jsonl"
                self._put_file(NewFile(name, batch.owner, OUTPUT_PURPOSE, filename), now)
            self._execute(
                queries.PUT_BATCH,
                *(batch.id, batch.owner, batch.caller, batch.endpoint),
                *(batch.input_file, batch.output_file, batch.error_file),
                *(batch.window, batch.metadata, batch.output_s),
                *(BatchStatus.VALIDATING, now, batch.expires_at),
            )
        return self.get_batch(batch.id, batch.owner)

    def get_batch(self, batch: str, owner: str) -> StoredBatch | None:
        """Return a batch; None if `owner` has no such batch."""
        return self._batch(self._one(queries.GET_BATCH, batch, owner))

    def list_batches(self, owner: str, after: str | None, limit: int) -> list[StoredBatch]:
        """Return up to `limit` batches, the newest first, after the batch `after`. Raises
        UnknownId."""
        start = self._seq(queries.BATCH_SEQ, after, owner)
        rows = self._connection.execute(queries.LIST_BATCHES, (owner, start, limit)).fetchall()
        return [each for row in rows if (each := self._batch(row)) is not None]

    def cancel_batch(self, batch: str, owner: str, now: float) -> bool:
        """Cancel a batch. A batch that is being cancelled already stays so. Return whether `owner`
        has such a batch. Raises CannotCancel if it has ended or is about to."""
        with self._writing():
            found = self.get_batch(batch, owner)
            if found is None:
                return False
            is_new = found.status is not BatchStatus.CANCELLING
            if is_new and self._move(batch, BatchEvent.CANCEL, now) is None:
                raise CannotCancel(found.status)
        return True

    # ---- batches, for the process that executes them

    def claim(self, now: float) -> StoredBatch | None:
        """Return an open batch that no process executes, and hold its lease from now on; None if
        there is none. Owners with fewer batches that are executed come first."""
        self._sweep(now)
        if self._one(queries.CLAIMABLE, now) is None:
            return None
        with self._writing():  # reads again, because another process may have claimed it
            found = self._batch(self._one(queries.CLAIMABLE, now))
            if found is not None:
                self._execute(queries.CLAIM, found.id, self._runner, now + LEASE_S)
        return found

    def renew(self, now: float) -> dict[str, BatchStatus]:
        """Renew the leases of this process's batches. Return the status of each by its id."""
        with self._writing():
            self._execute(queries.RENEW, self._runner, now + LEASE_S)
            rows = self._connection.execute(queries.MINE, (self._runner,)).fetchall()
        return {batch: BatchStatus(status) for batch, status in rows}

    def release(self, batch: str) -> None:
        """End this process's lease of a batch, so that another process continues it at once."""
        with self._writing():
            self._execute(queries.RELEASE, self._runner, batch)

    def done_lines(self, batch: StoredBatch) -> set[int]:
        """Return the numbers of the lines that have results."""
        files = (batch.output_file, batch.error_file)
        return {number for (number,) in self._connection.execute(queries.DONE_LINES, files)}

    def set_total(self, batch: str, num_lines: int) -> None:
        with self._writing():
            if self._is_mine(batch):
                self._execute(queries.SET_TOTAL, batch, num_lines)

    def set_errors(self, batch: str, errors: bytes) -> None:
        with self._writing():
            if self._is_mine(batch):
                self._execute(queries.SET_ERRORS, batch, errors)

    def add_results(
        self, batch: StoredBatch, results: Sequence[LineResult], *, has_limit: bool = True
    ) -> bool:
        """Store results of lines that have none yet. Return False, and store nothing, if this
        process has lost the batch. Raises StoreFull, unless `has_limit` is false."""
        with self._writing():
            if not self._is_mine(batch.id):
                return False
            if has_limit:
                self._check_room(0)
            for failed, file in ((False, batch.output_file), (True, batch.error_file)):
                rows = [(file, r.number, r.data) for r in results if r.has_failed == failed]
                self._many(queries.PUT_PIECE, rows)
                self._execute(queries.ADD_BYTES, file, sum(len(data) for _, _, data in rows))
            num_failed = sum(result.has_failed for result in results)
            values = (batch.id, len(results) - num_failed, num_failed)
            self._execute(queries.COUNT_RESULTS, *values)
        return True

    def move(self, batch: StoredBatch, event: BatchEvent, now: float) -> BatchStatus | None:
        """Handle an event of a batch, and return its new status. A final status makes its output
        files visible. Return None if this process has lost the batch, or if its status ignores
        the event, for example because the batch was cancelled. Raises LinesMissing if the batch
        cannot have ended."""
        with self._writing():
            if not self._is_mine(batch.id):
                return None
            status = self._move(batch.id, event, now)
            if status is None:
                return None
            if event in NEEDS_ALL:
                self._check_complete(batch.id)  # an exception undoes the move
            if status in FINAL:
                expires_at = now + batch.output_s
                for file in (batch.output_file, batch.error_file):
                    self._execute(queries.SHOW_OUTPUT, file, now, expires_at)
        return status

    # ---- metrics

    def facts(self) -> StoreFacts:
        counts = {status: 0 for status in BatchStatus if status not in FINAL}
        for status, count in self._connection.execute(queries.OPEN_BY_STATUS):
            counts[BatchStatus(status)] = count
        return StoreFacts(counts, self._used_bytes())

    # ---- internals

    def _move(self, batch: str, event: BatchEvent, now: float) -> BatchStatus | None:
        """Change the status of a batch and return the new one; None if it ignores `event`."""
        found = self._one(queries.STATUS_OF, batch)
        assert found is not None, batch
        before = BatchStatus(found[0])
        if BATCH_MACHINE.ignores(before, event):
            return None
        status = BATCH_MACHINE.move(before, event)
        times = {**msgspec.json.decode(found[1]), status.value: now}
        self._execute(queries.SET_STATUS, batch, status, msgspec.json.encode(times))
        return status

    def _check_complete(self, batch: str) -> None:
        """Raise LinesMissing unless each line has a result. Results can be missing if they could
        not be stored."""
        row = self._one(queries.COUNTS, batch)
        if row is None or row[0] != row[1]:
            raise LinesMissing(batch)

    def _is_mine(self, batch: str) -> bool:
        return self._one(queries.OWNED_STATUS, batch, self._runner) is not None

    def _put_file(self, file: NewFile, now: float) -> None:
        self._execute(queries.PUT_FILE, file.id, file.owner, file.purpose, file.filename, now)

    def _remove_file(self, file: str) -> None:
        self._execute(queries.DELETE_PIECES, file)
        self._execute(queries.DELETE_FILE, file)

    def _check_room(self, num_bytes: int) -> None:
        if not self._has_room(num_bytes):
            raise StoreFull

    def _has_room(self, num_bytes: int) -> bool:
        return self._used_bytes() + num_bytes <= self._max_bytes

    def _seq(self, statement: str, name: str | None, owner: str) -> int | None:
        if name is None:
            return None
        row = self._one(statement, name, owner)
        if row is None:
            raise UnknownId
        return int(row[0])

    def _sweep(self, now: float) -> None:
        """Delete files that have expired, uploads that were never finished, and old batches."""
        if now - self._swept_at < SWEEP_EVERY_S:
            return
        with self._writing():
            values = (now, now - UPLOAD_S, SWEEP_FILES)
            files = self._connection.execute(queries.OVERDUE_FILES, values).fetchall()
            for (file,) in files:
                self._remove_file(file)
            if len(files) < SWEEP_FILES:  # otherwise the next call continues
                self._swept_at = now
            self._execute(queries.OLD_BATCHES, now - self._max_age_s)

    def _batch(self, row: tuple[Any, ...] | None) -> StoredBatch | None:
        if row is None:
            return None
        *fields, has_output, has_errors = row
        fields[10] = status = BatchStatus(fields[10])
        is_paused = status is BatchStatus.IN_PROGRESS and not self._has_room(0)
        return StoredBatch(*[*fields, bool(has_output), bool(has_errors), is_paused])


def new_id(prefix: str) -> str:
    """Return a new id of a file or a batch."""
    return f"{prefix}{uuid.uuid4().hex}"
