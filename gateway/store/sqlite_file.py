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

from gateway.http.errors import StoreUnusable
from gateway.thread_pool import result_of

BUSY_MS = 10_000
"""Longest time that SQLite waits for a lock of another process."""
JOURNAL_BYTES = 16 << 20
"""Size to which SQLite truncates its write-ahead log."""
RETRY_S = 10
"""Seconds after which a client may try again if the file cannot be used."""

T = TypeVar("T")
D = TypeVar("D", bound="SqliteFile")


_CAUSES = {
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_READONLY: "its file cannot be written",
    sqlite3.SQLITE_PERM: "its file cannot be written",
    sqlite3.SQLITE_CANTOPEN: "its file cannot be opened",
    sqlite3.SQLITE_IOERR: "its disk reports an error",
    sqlite3.SQLITE_BUSY: "another process has locked its file for too long",
    sqlite3.SQLITE_CORRUPT: "its file is damaged",
    sqlite3.SQLITE_NOTADB: "its file is not a database",
}
"""SQLite's error code -> why the file cannot be used. Other codes are mistakes of this program."""


def write_obstacle(path: str) -> str:
    """Return why the file at `path` cannot be created or written, such as "read-only file system";
    "" if it probably can. Nothing is created."""
    place, mode = Path(path), os.R_OK | os.W_OK
    if not os.path.lexists(place) or os.access(place, mode):
        place, mode = place.parent, os.W_OK | os.X_OK  # SQLite needs further files beside it
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            return f"{place} is not a directory"
    if os.access(place, mode):
        return ""
    is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
    return "read-only file system" if is_read_only else "permission denied"


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
    The file is opened on first use, after the fork.

    path    of the file that `open_database` opens
    option  that sets the path, such as "--file-store"
    """

    def __init__(self, open_database: Callable[[], D], path: str, *, option: str) -> None:
        self.path, self.option = path, option
        self._open_database = open_database
        self._pool: ThreadPool | None = None
        self._database: D | None = None

    def call(self, work: Callable[[D], T]) -> T:
        """Run `work` in the store's thread and return its result. Raises the exceptions of `work`,
        and StoreUnusable if the file cannot be used."""
        if self._pool is None:
            self._pool = ThreadPool(1)
        try:
            return result_of(self._pool, lambda: work(self._opened()))
        except sqlite3.Error as error:
            # The code is absent if SQLite did not raise the error.
            cause = _CAUSES.get(getattr(error, "sqlite_errorcode", -1) & 0xFF)
            if isinstance(error, _NotOpened):
                cause = str(error)
            if cause is None:
                raise
            name = self.option.strip("-").replace("-", " ")
            message = f"the {name} cannot be used: {cause} (see {self.option})"
            raise StoreUnusable(message, retry_after_s=RETRY_S) from error

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


class _NotOpened(sqlite3.OperationalError):
    """Raised if a file cannot be opened. The message says why, without the path."""


def _open(path: str, schema: str, version: int) -> sqlite3.Connection:
    """Return a connection to the file, which is created if it does not exist. Raises
    sqlite3.Error."""
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _NotOpened((error.strerror or "").lower()) from None
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with ExitStack() as on_failure:
        on_failure.callback(connection.close)
        _prepare(connection, schema, version)
        on_failure.pop_all()
    return connection


def _prepare(connection: sqlite3.Connection, schema: str, version: int) -> None:
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
        raise _NotOpened(f"its file has schema version {found}; this server needs {version}")
    connection.executescript("BEGIN IMMEDIATE;" + schema + "COMMIT;")
    connection.execute(f"PRAGMA user_version = {version}")
