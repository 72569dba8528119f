"""Streams a run from the store to a client that reconnects, in any process."""

from __future__ import annotations

import logging
import sqlite3
import time

import gevent

from gateway.http.client_socket import Outlet
from gateway.store.database import Store
from gateway.store.queries import RunPage

log = logging.getLogger(__name__)

POLL_S = 0.1
WANT_EVERY_S = 1.0


class RunTail:
    """Writes the events of a run after event `after`, and later ones until its end.

    Meanwhile, and for `window_s` more, the run is marked as wanted.
    """

    def __init__(self, store: Store, run: str, owner: str, after: int, window_s: float) -> None:
        self._store = store
        self._run, self._owner = run, owner
        self._after = after
        self._window_s = window_s
        self._wanted_at = 0.0
        self._greenlet: gevent.Greenlet[..., None] | None = None

    def listen(self, outlet: Outlet) -> None:
        self._greenlet = gevent.spawn(self._follow, outlet)

    def leave(self) -> None:
        if self._greenlet is not None:
            self._greenlet.kill(block=False)

    def _follow(self, outlet: Outlet) -> None:
        try:
            while not outlet.is_cut and self._write_page(outlet):
                pass
        except sqlite3.Error:
            log.exception("cannot read a stream from the store")
            outlet.cut()
        outlet.finish()

    def _write_page(self, outlet: Outlet) -> bool:
        """Write the next events. Return whether there may be more."""
        page = self._page(time.time())
        if page is None:  # the run was deleted
            return False
        if page.frames:
            self._after += len(page.frames)
            outlet.write(b"".join(page.frames))
            outlet.wait_drained()
        elif not page.is_last:
            gevent.sleep(POLL_S)
        return not page.is_last

    def _page(self, now: float) -> RunPage | None:
        if now - self._wanted_at >= WANT_EVERY_S:
            self._wanted_at = now
            self._store.call(lambda database: database.want(self._run, now + self._window_s))
        return self._store.call(
            lambda database: database.page(self._run, self._owner, self._after, now)
        )
