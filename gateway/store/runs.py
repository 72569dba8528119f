"""Generations of this process that go on without their client, and the one who writes them down.

    hub          `Run.write`, `Run.close`: frames gather
    the scribe   every FLUSH_S what all runs have said goes into the store, in one transaction;
                 every BEAT_S their leases are renewed, and what others want of them is heard

A run's own client, while it is there, is written to at once; its last event it hears when the run
is in the store. A run that cannot be stored is aborted: nobody could ever pick it up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import gevent
from gevent.event import Event

from gateway.http.client_socket import Outlet
from gateway.store.queries import NewRun, RunBatch, RunControl, StoredRecord
from gateway.store.store import Store

log = logging.getLogger(__name__)

FLUSH_S = 0.05
BEAT_S = 0.5


class DetachedRun:
    """abort    called, once at most, from a greenlet, where nobody wants the run any more; it calls
    `close`, at once
    """

    def __init__(self, run_id: str, wake: Callable[[], None]) -> None:
        self.id = run_id
        self.abort: Callable[[], None] = lambda: None
        self.is_over = False
        self._wake = wake
        self._next_number = 0
        self._waiting: list[bytes] = []
        self._last: Sequence[bytes] | None = None
        self._body: bytes | None = None
        self._listener: Outlet | None = None
        self._early: list[bytes] | None = []

    @property
    def has_listener(self) -> bool:
        return self._listener is not None or self._early is not None

    # ---- for the hub

    def write(self, frames: Sequence[bytes]) -> None:
        self._waiting += frames
        if self._listener is not None:
            self._listener.write(b"".join(frames))
        elif self._early is not None:
            self._early += frames
        self._wake()

    def close(self, frames: Sequence[bytes], body: bytes | None = None) -> None:
        """The last words; `body`: the response, where there is one."""
        self._last, self._body = frames, body
        self._wake()

    def note(self, body: bytes) -> None:
        """The response as it is now."""
        self._body = body
        self._wake()

    def listen(self, outlet: Outlet) -> None:
        """The client hears all from the first frame on."""
        early, self._early = self._early, None
        self._listener = outlet
        if early:
            outlet.write(b"".join(early))
        if self.is_over:
            self._tell_last()

    def leave(self) -> None:
        """The client is gone, or has never wanted to listen."""
        self._listener = self._early = None

    # ---- for the scribe

    def batch(self) -> RunBatch | None:
        """What is to be written down; None: nothing."""
        if not self._waiting and self._body is None and self._last is None:
            return None
        frames = [*self._waiting, *(self._last or ())]
        batch = RunBatch(self.id, self._next_number, frames, self._last is not None, self._body)
        self._next_number += len(frames)
        self._waiting, self._body = [], None
        return batch

    def written(self, batch: RunBatch) -> None:
        """`batch` is in the store, or will never be."""
        if batch.is_last:
            self.is_over = True
            self._tell_last()

    def _tell_last(self) -> None:
        if self._listener is not None:
            self._listener.write(b"".join(self._last or ()))
            self._listener.finish()


class Runs:
    """window_s  how long a run that needs a listener goes on without one"""

    def __init__(self, store: Store, window_s: float) -> None:
        self._store = store
        self._window_s = window_s
        self._runs: dict[str, DetachedRun] = {}
        self._news = Event()
        self._scribe: gevent.Greenlet[..., None] | None = None
        self._beat_at = 0.0

    def __len__(self) -> int:
        return len(self._runs)

    def begin(self, run: NewRun, record: StoredRecord | None = None) -> DetachedRun:
        """Raises sqlite3.Error where it cannot be stored."""
        now = time.time()
        self._store.ask(lambda database: database.begin(run, record, now))
        begun = self._runs[run.id] = DetachedRun(run.id, self._news.set)
        if self._scribe is None or self._scribe.dead:
            self._beat_at = time.monotonic()
            self._scribe = gevent.spawn(self._write_down)
        return begun

    def abort(self, run_id: str) -> None:
        """If it is one of ours."""
        if (run := self._runs.get(run_id)) is not None:
            run.abort()

    # ---- the scribe

    def _write_down(self) -> None:
        """As long as there are runs."""
        while self._runs:
            self._news.wait(BEAT_S)
            gevent.sleep(FLUSH_S)
            self._news.clear()
            try:
                self._flush()
                if time.monotonic() - self._beat_at >= BEAT_S:
                    self._beat_at = time.monotonic()
                    self._beat()
            except Exception:  # whatever it is, none of them may be left open without a scribe
                log.exception("runs cannot be written down; they are aborted")
                self._drop(list(self._runs))

    def _flush(self) -> None:
        batches = [batch for run in self._runs.values() if (batch := run.batch()) is not None]
        if not batches:
            return
        now = time.time()
        try:
            lost = self._store.ask(lambda database: database.say(batches, now, self._window_s))
        finally:
            self._written(batches)
        self._drop(lost)

    def _written(self, batches: Sequence[RunBatch]) -> None:
        for batch in batches:
            run = self._runs[batch.run]
            run.written(batch)
            if run.is_over:
                del self._runs[batch.run]

    def _beat(self) -> None:
        now, known = time.time(), list(self._runs.values())
        attended = [run.id for run in known if run.has_listener]
        wishes = self._store.ask(
            lambda database: database.beat(attended, now + self._window_s, now)
        )
        for run in known:
            wish = wishes.get(run.id)
            if wish is None:
                self._drop([run.id])
            elif _is_unwanted(wish, now):
                run.abort()

    def _drop(self, names: Sequence[str]) -> None:
        """Runs that are no longer ours, or cannot be stored."""
        for name in names:
            if (run := self._runs.pop(name, None)) is not None:
                run.abort()
                if (batch := run.batch()) is not None:
                    run.written(batch)


def _is_unwanted(wish: RunControl, now: float) -> bool:
    return wish.is_cancelled or (wish.wanted_until is not None and wish.wanted_until < now)
