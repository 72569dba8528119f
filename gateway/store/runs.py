"""Runs: generations of this process that continue without their client.

The frames of a run are collected by `DetachedRun.write` and `DetachedRun.close`, which are called
in gevent's hub. The flusher is a greenlet that stores them: every FLUSH_S seconds it writes the new
frames of all runs in one transaction. Every BEAT_S seconds it renews the leases of the runs, and
checks whether another process has cancelled one of them.

While the client that started a run is connected, frames are sent to it at once. Only the last event
is held back until the whole run is stored. A run that cannot be stored is aborted, because its
client could not resume it.
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
from gateway.store.database import Database, Interrupt
from gateway.store.queries import NewRun, RunBatch, RunControl, StoredRecord
from gateway.store.sqlite_file import Store
from protocol.config.base import NO_PATH
from protocol.config.gateway import GatewayConfig

log = logging.getLogger(__name__)

FLUSH_S = 0.05
BEAT_S = 0.5
DAY_S = 86400.0
"""Seconds in a day."""
RESPONSE = "response"
"""Kind of a run that is a response generated in the background."""
STREAM = "stream"
"""Kind of a run that is a resumable stream."""


class DetachedRun:
    """A response or stream of this process that continues without its client.

    wake  called when there are new frames or a new response to store
    """

    def __init__(self, run_id: str, wake: Callable[[], None]) -> None:
        self.id = run_id
        #: Called at most once, from a greenlet, if the run is no longer wanted or cannot be stored.
        #: The function must call `close` before it returns.
        self.abort: Callable[[], None] = lambda: None
        #: Whether the last frames have been stored, or could not be stored.
        self.is_over = False
        self._wake = wake
        self._next_number = 0
        #: Frames that have not been stored yet.
        self._unstored: list[bytes] = []
        #: The last frames; None until `close`.
        self._last: Sequence[bytes] | None = None
        #: The response, if it has changed since it was stored.
        self._body: bytes | None = None
        #: Writes to the client that started the run; None if it is not connected.
        self._outlet: Outlet | None = None
        #: Frames for that client, until `attach` is called; None after `attach` or `detach`.
        self._early: list[bytes] | None = []

    @property
    def has_client(self) -> bool:
        """Whether the client that started the run is connected, or will be attached soon."""
        return self._outlet is not None or self._early is not None

    # ---- called in gevent's hub

    def write(self, frames: Sequence[bytes]) -> None:
        self._unstored += frames
        if self._outlet is not None:
            self._outlet.write(b"".join(frames))
        elif self._early is not None:
            self._early += frames
        self._wake()

    def close(self, frames: Sequence[bytes], body: bytes | None = None) -> None:
        """End the run with its last frames. `body` is the final response, if there is one."""
        self._last, self._body = frames, body
        self._wake()

    def set_body(self, body: bytes) -> None:
        """Set the current response, which the flusher stores."""
        self._body = body
        self._wake()

    def attach(self, outlet: Outlet) -> None:
        """Write all frames, from the first one on, to the client that started the run: `outlet`."""
        early, self._early = self._early, None
        self._outlet = outlet
        if early:
            outlet.write(b"".join(early))
        if self.is_over:
            self._write_last()

    def detach(self) -> None:
        """Stop writing frames to the client, because it has disconnected or does not stream."""
        self._outlet = self._early = None

    # ---- called by the flusher

    def batch(self) -> RunBatch | None:
        """Return the frames and the response that are not stored yet; None if there are none."""
        if not self._unstored and self._body is None and self._last is None:
            return None
        frames = [*self._unstored, *(self._last or ())]
        batch = RunBatch(self.id, self._next_number, frames, self._last is not None, self._body)
        self._next_number += len(frames)
        self._unstored, self._body = [], None
        return batch

    def on_stored(self, batch: RunBatch) -> None:
        """Handle a batch that was stored or could not be stored. If the batch ends the run, write
        the run's last event to the client."""
        if batch.is_last:
            self.is_over = True
            self.abort = lambda: None  # it may refer to this run
            self._write_last()

    def _write_last(self) -> None:
        if self._outlet is not None:
            self._outlet.write(b"".join(self._last or ()))
            self._outlet.finish()


class Runs:
    """The runs of this process.

    window_s  seconds that a resumable run continues without a client
    """

    def __init__(self, store: Store[Database], window_s: float) -> None:
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
        """Store frames and renew leases while there are runs."""
        while self._runs:
            self._wake.wait(BEAT_S)
            gevent.sleep(FLUSH_S)
            self._wake.clear()
            try:
                self._flush()
                if time.monotonic() - self._beat_at >= BEAT_S:
                    self._beat_at = time.monotonic()
                    self._renew_leases()
            except Exception:  # no run may stay open without a flusher
                log.exception("cannot store detached runs; they are aborted")
                self._abort(list(self._runs))

    def _flush(self) -> None:
        """Store the new frames of all runs. Raises sqlite3.Error."""
        batches = [batch for run in self._runs.values() if (batch := run.batch()) is not None]
        if not batches:
            return
        now = time.time()
        try:
            lost = self._store.call(lambda database: database.append(batches, now, self._window_s))
        finally:
            self._on_stored(batches)
        self._abort(lost)

    def _on_stored(self, batches: Sequence[RunBatch]) -> None:
        for batch in batches:
            run = self._runs[batch.run]
            run.on_stored(batch)
            if run.is_over:
                del self._runs[batch.run]

    def _renew_leases(self) -> None:
        """Renew the leases of all runs, and abort runs that were deleted or are not wanted."""
        now, open_runs = time.time(), list(self._runs.values())
        attended = [run.id for run in open_runs if run.has_client]
        controls = self._store.call(
            lambda database: database.renew_leases(attended, now + self._window_s, now)
        )
        for run in open_runs:
            control = controls.get(run.id)
            if control is None:
                self._abort([run.id])
            elif _is_unwanted(control, now):
                run.abort()

    def _abort(self, names: Sequence[str]) -> None:
        """Abort and remove runs that another process has ended, or that cannot be stored."""
        for name in names:
            if (run := self._runs.pop(name, None)) is not None:
                run.abort()
                if (batch := run.batch()) is not None:
                    run.on_stored(batch)


def _is_unwanted(control: RunControl, now: float) -> bool:
    """Return whether a client cancelled the run, or no client resumed it in time."""
    is_expired = control.wanted_until is not None and control.wanted_until < now
    return control.is_cancelled or is_expired


@dataclass(frozen=True, slots=True)
class Persistence:
    """The store and the runs of this process, made from the operator's options."""

    store: Store[Database]
    runs: Runs
    #: Seconds that a resumable stream continues, and is kept, without a client.
    window_s: float

    @classmethod
    def from_config(
        cls, config: GatewayConfig, interrupt: Mapping[str, Interrupt]
    ) -> Persistence | None:
        """Return the store and its runs; None if the operator turned storing off.

        interrupt  kind of a run -> the function that makes the run's last event and final response
                   if its process has died
        """
        if config.response_store in ("", NO_PATH):
            return None
        store = Store(
            partial(
                Database,
                config.response_store,
                interrupt,
                max_bytes=config.response_store_mib << 20,
                max_age_s=config.response_store_days * DAY_S,
            ),
            config.response_store,
            option="--response-store",
        )
        return cls(store, Runs(store, config.resume_s), config.resume_s)

    @property
    def is_busy(self) -> bool:
        return bool(len(self.runs))

    def close(self) -> None:
        self.store.close()
