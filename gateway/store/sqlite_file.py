"""A SQLite file that gateway processes share, and the thread in which a process uses it.

`SqliteFile` is the base of the databases, whose operations block; `Store` runs them in a thread, in
order. The processes of one host may share the file (SQLite's WAL mode). The file is created with
mode 0600, so that only the user who runs the server can read it. The mode of an existing file is
not changed.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from gevent.threadpool import ThreadPool

from gateway.threads import result_of

BUSY_MS = 10_000
"""Longest time that SQLite waits for a lock of another process."""
JOURNAL_BYTES = 16 << 20
"""Size to which SQLite truncates its write-ahead log."""

T = TypeVar("T")
D = TypeVar("D", bound="SqliteFile")


def is_disk_full(error: sqlite3.Error) -> bool:
    """Return whether an operation failed because the disk has no room. The operation can be
    tried again."""
    code = getattr(error, "sqlite_errorcode", 0)  # absent if SQLite did not raise the error
    return bool(code & 0xFF == sqlite3.SQLITE_FULL)


class SqliteFile:
    """An open database file. Its methods block, and only one thread at a time may call them. The
    constructor raises sqlite3.Error if the file cannot be used.

    schema    statements that create the tables if they do not exist
    version   version of the schema; a file with another version is refused
    """

    def __init__(self, path: str, schema: str, version: int) -> None:
        self._connection = _open(path, schema, version)

    def close(self) -> None:
        self._connection.close()

    def _used_bytes(self) -> int:
        """Return the size of the file without its free pages."""
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the `with` block as one transaction that may write."""
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


class Store(Generic[D]):
    """Runs the operations of a database in one thread, in order. Other greenlets are not blocked.
    The file is opened on first use, after the fork."""

    def __init__(self, open_database: Callable[[], D]) -> None:
        self._open_database = open_database
        self._pool: ThreadPool | None = None
        self._database: D | None = None

    def call(self, work: Callable[[D], T]) -> T:
        """Run `work` in the store's thread and return its result. Raises the exceptions of `work`,
        and sqlite3.Error if the file cannot be used."""
        if self._pool is None:
            self._pool = ThreadPool(1)
        return result_of(self._pool, lambda: work(self._opened()))

    def close(self) -> None:
        if self._database is not None:
            self.call(SqliteFile.close)
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def _opened(self) -> D:
        if self._database is None:
            self._database = self._open_database()
        return self._database


def _open(path: str, schema: str, version: int) -> sqlite3.Connection:
    """Return a connection to the file, which is created if it does not exist. Raises
    sqlite3.Error."""
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise sqlite3.OperationalError(f"{path}: {error.strerror}") from None
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with ExitStack() as on_failure:
        on_failure.callback(connection.close)
        _prepare(connection, path, schema, version)
        on_failure.pop_all()
    return connection


def _prepare(connection: sqlite3.Connection, path: str, schema: str, version: int) -> None:
    """Set SQLite's options and create the tables. Raises sqlite3.Error."""
    for pragma in (
        f"busy_timeout = {BUSY_MS}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        f"journal_size_limit = {JOURNAL_BYTES}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found not in (0, version):
        raise sqlite3.DatabaseError(
            f"{path} has schema version {found}; this server needs {version}"
        )
    connection.executescript("BEGIN IMMEDIATE;" + schema + "COMMIT;")
    connection.execute(f"PRAGMA user_version = {version}")
