"""Polls the engines for the clients of /v1/watch, and sends the same frames to all of them.

One timer per process polls, however many watch, and only while someone does. Each frame is encoded
once, and once more for new watchers, with what was before it. A watcher that does not read in time
skips frames. All of this happens in gevent's hub, without a greenlet, so a frame costs the process
little (tests/benchmarks/watch_cost.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from gevent import get_hub

from gateway.engine.base import Report
from gateway.engine.client import ConnectedEngine
from protocol.engine.messages import EngineStatus, Output
from protocol.shared.watch import EngineFrame, EngineWatcher, WatchFrame
from protocol.wire.errors import ServingError

EVERY_S = 1.0
"""Seconds between two frames."""
MAX_ROWS = 256
"""Most requests in a frame, of all engines together; but at least MIN_ROWS of each."""
MIN_ROWS = 8
MAX_LATE = 3
"""An engine that has not answered after this many rounds is reported."""


class Watcher(Protocol):
    """Receives frames. The methods are called in gevent's hub and do not block."""

    def show(self, frame: bytes) -> None:
        """Receive the JSON of the next frame."""

    def end(self) -> None:
        """Finish: no frames follow, because this process shuts down."""


class WatchPoller:
    """Polls all engines while there are watchers.

    engines       returns (name of the model, its engines) for each model
    is_draining   returns whether this process shuts down; then all watchers are ended
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[tuple[str, Sequence[ConnectedEngine]]]],
        is_draining: Callable[[], bool],
    ) -> None:
        self._list_engines = engines
        self._is_draining = is_draining
        self._watchers: list[Watcher] = []
        #: Those that have received no frame yet.
        self._new: list[Watcher] = []
        self._timer: Any = None
        self._engines: dict[tuple[str, str], EngineWatcher] = {}
        self._clear()

    def _clear(self) -> None:
        self._engines.clear()
        #: The engines of this round, in order, and the newest frame of each.
        self._frames: dict[EngineWatcher, EngineFrame] = {}
        #: Those whose answers the next frame waits for.
        self._pending: set[EngineWatcher] = set()
        #: Engine that has not answered -> how many rounds ago it was asked.
        self._num_late: dict[EngineWatcher, int] = {}
        #: The last frame, encoded.
        self._last: bytes | None = None

    def add(self, watcher: Watcher) -> None:
        """Send the last frame, with what was before it, and all later ones to `watcher`."""
        self._watchers.append(watcher)
        # While a round is open, some engines have steps that the next frame will have, too.
        if self._last is not None and not self._pending:
            watcher.show(self._encode([engine.first_frame() for engine in self._frames]))
        else:
            self._new.append(watcher)
        if self._timer is None:
            self._timer = get_hub().loop.timer(0, repeat=EVERY_S)
            self._timer.start(self._poll)

    def remove(self, watcher: Watcher) -> None:
        """Send no more frames to `watcher`. Without watchers, polling ends. May be called twice."""
        for watchers in (self._watchers, self._new):
            if watcher in watchers:
                watchers.remove(watcher)
        if not self._watchers:
            self.close()

    def close(self) -> None:
        """Stop polling."""
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None
        self._clear()

    def _poll(self) -> None:
        """Ask all engines for their status. If some have not answered the last time, send the frame
        without their news first."""
        if self._is_draining():
            watchers, self._watchers = self._watchers, []
            self.close()
            for watcher in watchers:
                watcher.end()
            return
        if self._pending:
            for late in self._pending:
                self._frames[late] = late.repeat()
            self._show()
        self._ask_all()

    def _ask_all(self) -> None:
        places = [
            (self._watcher_of(model, number, connection), connection)
            for model, connections in self._list_engines()
            for number, connection in enumerate(connections)
        ]
        before, self._frames = self._frames, {}
        max_rows = max(MIN_ROWS, MAX_ROWS // max(1, len(places)))
        for engine, connection in places:
            self._frames[engine] = before.get(engine) or engine.repeat()
            if engine in self._num_late:
                self._on_late(engine)
            else:
                self._ask(engine, connection, max_rows)
        self._pending &= self._frames.keys()
        if not self._pending:
            self._show()

    def _ask(self, engine: EngineWatcher, connection: ConnectedEngine, max_rows: int) -> None:
        on_report = partial(self._on_report, engine, connection)
        try:
            connection.client.request_status(max_rows, engine.after_step, on_report)
        except ServingError as error:
            self._frames[engine] = engine.fail(error.message)
        else:
            self._num_late[engine] = 0
            self._pending.add(engine)

    def _on_late(self, engine: EngineWatcher) -> None:
        """Note that an engine has not answered in time. It is asked again after MAX_LATE rounds."""
        self._num_late[engine] += 1
        if self._num_late[engine] >= MAX_LATE:
            del self._num_late[engine]
            self._pending.discard(engine)
            self._frames[engine] = engine.fail("the engine does not answer")

    def _watcher_of(self, model: str, number: int, connection: ConnectedEngine) -> EngineWatcher:
        key = model, connection.client.address
        if key not in self._engines:
            self._engines[key] = EngineWatcher(model, connection.role, number)
        return self._engines[key]

    def _on_report(
        self, engine: EngineWatcher, connection: ConnectedEngine, report: Report
    ) -> None:
        """Handle an engine's answer, which may be late, or its loss."""
        if isinstance(report, EngineStatus):
            frame = engine.push(report, connection.client.limits)
        else:
            assert isinstance(report, Output)
            assert report.error is not None
            frame = engine.fail(report.error.message)
        self._num_late.pop(engine, None)
        if engine not in self._frames:
            return  # the engine has left the list, or no one watches any more
        self._frames[engine] = frame
        if engine in self._pending:
            self._pending.remove(engine)
            if not self._pending:
                self._show()

    def _show(self) -> None:
        """Send the frames of all engines to all watchers."""
        new, self._new = self._new, []
        first = self._encode([engine.first_frame() for engine in self._frames]) if new else b""
        self._last = last = self._encode(list(self._frames.values()))
        for watcher in list(self._watchers):
            watcher.show(first if watcher in new else last)

    def _encode(self, engines: list[EngineFrame]) -> bytes:
        return msgspec.json.encode(WatchFrame(at=time.time(), every_s=EVERY_S, engines=engines))
