"""The database, for greenlets: its work is done in a thread of its own, one thing after the other,
so nobody else waits for a disk.

The file is opened when it is first needed, in the process that needs it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

from gevent.threadpool import ThreadPool

from gateway.store.database import Database, EpitaphOf
from gateway.threads import result_of

T = TypeVar("T")


class Store:
    """epitaphs  by the kind of a run"""

    def __init__(
        self, path: str, epitaphs: Mapping[str, EpitaphOf], *, max_bytes: int, max_age_s: float
    ) -> None:
        self.path = path
        self._epitaphs = epitaphs
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._pool: ThreadPool | None = None
        self._database: Database | None = None

    def ask(self, work: Callable[[Database], T]) -> T:
        """The result of `work`, done in the store's thread. Raises what it raises: sqlite3.Error
        where the file cannot be used."""
        if self._pool is None:
            self._pool = ThreadPool(1)
        return result_of(self._pool, lambda: work(self._opened()))

    def close(self) -> None:
        if self._database is not None:
            self.ask(Database.close)
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def _opened(self) -> Database:
        if self._database is None:
            self._database = Database(
                self.path,
                self._epitaphs,
                max_bytes=self._max_bytes,
                max_age_s=self._max_age_s,
                runner=f"{os.getpid()}-{uuid.uuid4().hex}",
            )
        return self._database
