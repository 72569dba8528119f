"""Generations of this process that continue without their client, and their flusher.

    hub      `DetachedRun.write` and `DetachedRun.close` collect frames
    flusher  a greenlet; every FLUSH_S it stores the new frames of all runs in one transaction, and
             every BEAT_S it renews their leases and reads cancellations by other processes

While a run's own client is connected, frames are written to it at once, but its last event only
after the run is stored. A run that cannot be stored is aborted, because it could not be resumed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import gevent
from gevent.event import Event

from gateway.http.client_socket import Outlet
from gateway.store.database import Database, Interrupt, Store
from gateway.store.queries import NewRun, RunBatch, RunControl, StoredRecord
from protocol.config.gateway import NO_STORE, GatewayConfig

log = logging.getLogger(__name__)

FLUSH_S = 0.05
BEAT_S = 0.5
DAY_S = 86400.0
RESPONSE = "response"
"""Kind of a run that is a response generated in the background."""
STREAM = "stream"
"""Kind of a run that is a resumable stream."""


class DetachedRun:
    """One run.

    abort   called at most once, from a greenlet, if the run is no longer wanted; it must call
            `close` immediately
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
        """End the run with its last frames; `body`: the final response, if there is one."""
        self._last, self._body = frames, body
        self._wake()

    def note(self, body: bytes) -> None:
        """Store `body` as the current response."""
        self._body = body
        self._wake()

    def listen(self, outlet: Outlet) -> None:
        """Write all frames from the first one on to `outlet`."""
        early, self._early = self._early, None
        self._listener = outlet
        if early:
            outlet.write(b"".join(early))
        if self.is_over:
            self._write_last()

    def leave(self) -> None:
        """Detach the client: it disconnected or does not stream."""
        self._listener = self._early = None

    # ---- for the flusher

    def batch(self) -> RunBatch | None:
        """Return what must be stored; None if there is nothing new."""
        if not self._waiting and self._body is None and self._last is None:
            return None
        frames = [*self._waiting, *(self._last or ())]
        batch = RunBatch(self.id, self._next_number, frames, self._last is not None, self._body)
        self._next_number += len(frames)
        self._waiting, self._body = [], None
        return batch

    def written(self, batch: RunBatch) -> None:
        """Note that `batch` has been stored or has failed."""
        if batch.is_last:
            self.is_over = True
            self._write_last()

    def _write_last(self) -> None:
        if self._listener is not None:
            self._listener.write(b"".join(self._last or ()))
            self._listener.finish()


class Runs:
    """The runs of this process. `window_s`: how long a resumable run continues without a client."""

    def __init__(self, store: Store, window_s: float) -> None:
        self._store = store
        self._window_s = window_s
        self._runs: dict[str, DetachedRun] = {}
        self._wake = Event()
        self._flusher: gevent.Greenlet[..., None] | None = None
        self._beat_at = 0.0

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, run: NewRun, record: StoredRecord | None = None) -> DetachedRun:
        """Store and return a new run. Raises sqlite3.Error if it cannot be stored."""
        now = time.time()
        self._store.call(lambda database: database.start_run(run, record, now))
        started = self._runs[run.id] = DetachedRun(run.id, self._wake.set)
        if self._flusher is None or self._flusher.dead:
            self._beat_at = time.monotonic()
            self._flusher = gevent.spawn(self._flush_loop)
        return started

    def abort(self, run_id: str) -> None:
        """Abort a run if this process owns it."""
        if (run := self._runs.get(run_id)) is not None:
            run.abort()

    # ---- the flusher

    def _flush_loop(self) -> None:
        """Flush and renew leases while there are runs."""
        while self._runs:
            self._wake.wait(BEAT_S)
            gevent.sleep(FLUSH_S)
            self._wake.clear()
            try:
                self._flush()
                if time.monotonic() - self._beat_at >= BEAT_S:
                    self._beat_at = time.monotonic()
                    self._beat()
            except Exception:  # no run may stay open without a flusher
                log.exception("cannot store detached runs; they are aborted")
                self._drop(list(self._runs))

    def _flush(self) -> None:
        batches = [batch for run in self._runs.values() if (batch := run.batch()) is not None]
        if not batches:
            return
        now = time.time()
        try:
            lost = self._store.call(lambda database: database.append(batches, now, self._window_s))
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
        controls = self._store.call(
            lambda database: database.renew_leases(attended, now + self._window_s, now)
        )
        for run in known:
            control = controls.get(run.id)
            if control is None:
                self._drop([run.id])
            elif _is_unwanted(control, now):
                run.abort()

    def _drop(self, names: Sequence[str]) -> None:
        """Abort runs that another process has ended, or that cannot be stored."""
        for name in names:
            if (run := self._runs.pop(name, None)) is not None:
                run.abort()
                if (batch := run.batch()) is not None:
                    run.written(batch)


def _is_unwanted(control: RunControl, now: float) -> bool:
    is_expired = control.wanted_until is not None and control.wanted_until < now
    return control.is_cancelled or is_expired


@dataclass(frozen=True, slots=True)
class Persistence:
    """The store and its runs, by the operator's options.

    window_s  how long a resumable stream waits for its client
    """

    store: Store
    runs: Runs
    window_s: float

    @classmethod
    def from_config(
        cls, config: GatewayConfig, interrupt: Mapping[str, Interrupt]
    ) -> Persistence | None:
        """Return None if nothing is stored. For `interrupt` see Database."""
        if config.response_store in ("", NO_STORE):
            return None
        store = Store(
            partial(
                Database,
                config.response_store,
                interrupt,
                max_bytes=config.response_store_mib << 20,
                max_age_s=config.response_store_days * DAY_S,
            )
        )
        return cls(store, Runs(store, config.resume_s), config.resume_s)

    @property
    def is_busy(self) -> bool:
        """Return whether a generation without a client is running."""
        return bool(len(self.runs))

    def close(self) -> None:
        self.store.close()
