"""The database for greenlets. Its work runs in order, in one thread, and blocks no greenlet.

The file is opened on first use, in the process that uses it.
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
    """epitaphs  functions that return the last event of a dead run, by the kind of the run"""

    def __init__(
        self, path: str, epitaphs: Mapping[str, EpitaphOf], *, max_bytes: int, max_age_s: float
    ) -> None:
        self.path = path
        self._epitaphs = epitaphs
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._pool: ThreadPool | None = None
        self._database: Database | None = None

    def call(self, work: Callable[[Database], T]) -> T:
        """Run `work` in the store's thread and return its result.

        Raises what `work` raises, and sqlite3.Error if the file cannot be used.
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
            self._database = Database(
                self.path,
                self._epitaphs,
                max_bytes=self._max_bytes,
                max_age_s=self._max_age_s,
                runner=f"{os.getpid()}-{uuid.uuid4().hex}",
            )
        return self._database
