"""The store's SQLite file. `Store` calls a `Database` in a thread, in order.

Invariants:

- A run's events, end and response change in one transaction, so they are complete and in order.
- A run ends once. If its lease expired and it was ended as dead, later batches of its process are
  dropped, and that process is informed.
- A reader never sees a dead run as open: the run is ended first, with a last event.
- Records that were not used for `max_age_s` are deleted, and the least recently used ones while the
  file is larger than `max_bytes`. Open runs stay.

The processes of one host may share the file (SQLite's WAL). It is private to its user.
"""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gevent.threadpool import ThreadPool

from gateway.store import queries
from gateway.store.queries import Interruption, NewRun, RunBatch, RunControl, RunPage, StoredRecord
from gateway.threads import result_of

LEASE_S = 10.0
BUSY_MS = 10_000
JOURNAL_BYTES = 16 << 20
SWEEP_EVERY_S = 60.0
EVICTED_AT_ONCE = 16
SPARED = 0.9
"""Share of `max_bytes` that is in use after an eviction."""

T = TypeVar("T")
Interrupt = Callable[[str, int, bytes | None], Interruption]
"""(run, number of its last event, the stored response) -> the end of a dead run."""


class BrokenChain(Exception):
    """A response refers to a previous response that was deleted."""

    def __init__(self, missing: str) -> None:
        super().__init__(missing)
        self.missing = missing


class Store:
    """The database for greenlets. Its work runs in order, in one thread, and blocks no greenlet.

    The file is opened on first use, in the process that uses it.
    """

    def __init__(self, open_database: Callable[[], Database]) -> None:
        self._open_database = open_database
        self._pool: ThreadPool | None = None
        self._database: Database | None = None

    def call(self, work: Callable[[Database], T]) -> T:
        """Run `work` in the store's thread and return its result.

        Raise what `work` raises, and sqlite3.Error if the file cannot be used.
        """
        if self._pool is None:
            self._pool = ThreadPool(1)
        return result_of(self._pool, lambda: work(self._opened()))

    def close(self) -> None:
        if self._database is not None:
            self.call(Database.close)
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def _opened(self) -> Database:
        if self._database is None:
            self._database = self._open_database()
        return self._database


class Database:
    """The open file. Methods block, and one thread may call them at a time.

    interrupt  the kind of a run -> the function that ends it if its process died
    runner     the unique name of this process
    """

    def __init__(
        self,
        path: str,
        interrupt: Mapping[str, Interrupt],
        *,
        max_bytes: int,
        max_age_s: float,
        runner: str = "",
    ) -> None:
        self._interrupt = interrupt
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._runner = runner or f"{os.getpid()}-{uuid.uuid4().hex}"
        self._swept_at = 0.0
        self._connection = _open(path)

    def close(self) -> None:
        self._connection.close()

    # ---- responses

    def put(self, record: StoredRecord, now: float) -> None:
        with self._writing():
            self._put(record, now)
        self._sweep(now)

    def get(self, response: str, owner: str, now: float) -> StoredRecord | None:
        self._end_dead_runs(now)
        row = self._one(queries.GET_RESPONSE, response, owner)
        return StoredRecord(*row) if row else None

    def chain(self, response: str, owner: str, now: float) -> list[StoredRecord]:
        """Return a response and all its predecessors, oldest first, and mark them as used now.

        Raises BrokenChain if one of them was deleted.
        """
        found: list[StoredRecord] = []
        name: str | None = response
        while name is not None:
            record = self.get(name, owner, now)
            if record is None:
                raise BrokenChain(name)
            found.append(record)
            name = record.previous
        with self._writing():
            self._many(queries.TOUCH, [(record.id, now) for record in found])
        return found[::-1]

    def delete(self, response: str, owner: str) -> bool:
        """Delete a response and its run. The process that owns the run notices and aborts it."""
        with self._writing():
            if self._one(queries.GET_RESPONSE, response, owner) is None:
                return False
            self._remove([response])
        return True

    # ---- runs, for the process that generates them

    def start_run(self, run: NewRun, record: StoredRecord | None, now: float) -> None:
        with self._writing():
            if record is not None:
                self._put(record, now)
            values = (run.id, run.owner, run.kind, self._runner, now, now + LEASE_S)
            self._execute(queries.PUT_RUN, *values, run.wanted_until)
        self._sweep(now)

    def append(self, batches: Sequence[RunBatch], now: float, window_s: float) -> list[str]:
        """Store new events. Return the runs that this process no longer owns; theirs are dropped.

        A run without a response is kept for `window_s` after its end.
        """
        lost = []
        with self._writing():
            for batch in batches:
                if self._one(queries.IS_OPEN, batch.run, self._runner) is None:
                    lost.append(batch.run)
                    continue
                numbered = enumerate(batch.frames, batch.first)
                self._many(queries.PUT_EVENT, [(batch.run, n, frame) for n, frame in numbered])
                if batch.is_last:
                    self._end(batch.run, batch.body, now, window_s)
                elif batch.body is not None:
                    self._execute(queries.SET_BODY, batch.run, batch.body)
        return lost

    def renew_leases(
        self, attended: Iterable[str], wanted_until: float, now: float
    ) -> dict[str, RunControl]:
        """Renew the leases of this process's open runs, and return their controls.

        Runs in `attended` have a connected client and are marked as wanted.
        """
        with self._writing():
            self._execute(queries.RENEW, self._runner, now + LEASE_S)
            self._many(queries.WANT_RUN, [(run, wanted_until) for run in attended])
            rows = self._connection.execute(queries.MINE, (self._runner,)).fetchall()
        return {run: RunControl(bool(is_cancelled), wanted) for run, is_cancelled, wanted in rows}

    # ---- runs, for their clients

    def cancel(self, run: str, owner: str) -> None:
        with self._writing():
            self._execute(queries.CANCEL_RUN, run, owner)

    def want(self, run: str, until: float) -> None:
        with self._writing():
            self._execute(queries.WANT_RUN, run, until)

    def page(
        self, run: str, owner: str, after: int, now: float, limit: int = 256
    ) -> RunPage | None:
        """Return the events after event `after`; None if this owner has no such run."""
        self._end_dead_runs(now)
        row = self._one(queries.GET_RUN, run, owner, now)
        if row is None:
            return None
        rows = self._connection.execute(queries.GET_EVENTS, (run, after, limit)).fetchall()
        frames = [frame for (frame,) in rows]
        has_ended = row[0] is not None
        if has_ended and not frames:
            frames = self._end_of_dead_run(run, after)
        return RunPage(frames, is_last=has_ended and len(frames) < limit)

    # ---- internals

    def _end_of_dead_run(self, run: str, after: int) -> list[bytes]:
        """Return the end of a dead run for a client that is ahead of the store.

        The client got events that were never stored, so the end has a lower number than `after`.
        """
        last = self._one(queries.LAST_EVENT, run)
        return [last[1]] if last is not None and last[0] < after else []

    def _put(self, record: StoredRecord, now: float) -> None:
        values = (record.id, record.owner, record.created_at, now, record.previous)
        self._execute(queries.PUT_RESPONSE, *values, record.input, record.body)

    def _end(self, run: str, body: bytes | None, now: float, window_s: float) -> None:
        """End a run. It is deleted with its response, or after `window_s` if it has none."""
        delete_at = None if body is not None else now + window_s
        self._execute(queries.END_RUN, run, now, delete_at)
        if body is not None:
            self._execute(queries.SET_BODY, run, body)

    def _end_dead_runs(self, now: float) -> None:
        if self._one(queries.DEAD, now) is None:
            return
        with self._writing():  # read again: another process may have ended them
            dead = self._connection.execute(queries.DEAD, (now,)).fetchall()
            for run, kind, wanted_until in dead:
                (number,) = self._one(queries.NEXT_NUMBER, run) or (0,)
                body = self._one(queries.BODY_OF, run)
                end = self._interrupt[kind](run, number, body[0] if body else None)
                self._execute(queries.PUT_EVENT, run, number, end.frame)
                window_s = max(0.0, (wanted_until or now) - now)
                self._end(run, end.body, now, window_s)

    def _sweep(self, now: float) -> None:
        self._end_dead_runs(now)
        if now - self._swept_at >= SWEEP_EVERY_S:
            self._swept_at = now
            with self._writing():
                rows = self._connection.execute(queries.OUT_OF_TIME, (now - self._max_age_s, now))
                self._remove([name for (name,) in rows.fetchall()])
        if self._used_bytes() > self._max_bytes:
            self._make_room()

    def _make_room(self) -> None:
        while self._used_bytes() > SPARED * self._max_bytes:
            with self._writing():
                rows = self._connection.execute(queries.LEAST_USED, (EVICTED_AT_ONCE,)).fetchall()
                if not rows:
                    return
                self._remove([name for (name,) in rows])

    def _used_bytes(self) -> int:
        """Return the file's size without free pages."""
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def _remove(self, names: Sequence[str]) -> None:
        rows = [(name,) for name in names]
        for statement in (queries.DELETE_RESPONSE, queries.DELETE_RUN, queries.DELETE_EVENTS):
            self._many(statement, rows)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._connection:  # commits, or rolls back after an exception
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def _execute(self, statement: str, *values: Any) -> None:
        self._connection.execute(statement, values)

    def _many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        self._connection.executemany(statement, rows)

    def _one(self, statement: str, *values: Any) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._connection.execute(statement, values).fetchone()
        return row


def _open(path: str) -> sqlite3.Connection:
    """Return a connection to the file, created if needed. Raise sqlite3.Error."""
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise sqlite3.OperationalError(f"{path}: {error.strerror}") from None
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with ExitStack() as on_failure:
        on_failure.callback(connection.close)
        _prepare(connection, path)
        on_failure.pop_all()
    return connection


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    for pragma in (
        f"busy_timeout = {BUSY_MS}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        f"journal_size_limit = {JOURNAL_BYTES}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, queries.VERSION):
        raise sqlite3.DatabaseError(
            f"{path} has schema version {version}; this server needs {queries.VERSION}"
        )
    connection.executescript("BEGIN IMMEDIATE;" + queries.SCHEMA + "COMMIT;")
    connection.execute(f"PRAGMA user_version = {queries.VERSION}")
