"""Polls the engines for those who watch them, and sends each the same frames.

One greenlet per process polls, however many watch, and only while someone does. Each frame is
encoded once. A watcher that does not read in time skips frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import gevent
import msgspec
from gevent.event import Event

from gateway.engine.client import ConnectedEngine
from protocol.errors import ServingError
from protocol.watch import EngineFrame, EngineWatcher, WatchFrame

EVERY_S = 1.0
"""Seconds between two frames."""
MAX_ROWS = 256
"""Most requests in a frame, of all engines together; but at least MIN_ROWS of each."""
MIN_ROWS = 8


class Watcher(Protocol):
    """Receives frames. The methods do not block."""

    def show(self, frame: bytes) -> None:
        """Take the JSON of the next frame."""

    def end(self) -> None:
        """Take the end: this process shuts down."""


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
        self._greenlet: gevent.Greenlet[..., None] | None = None
        #: Set when no one watches any more.
        self._is_alone = Event()
        #: The last frame; None while no one watches.
        self._last: bytes | None = None

    def add(self, watcher: Watcher) -> None:
        """Send the last frame and all later ones to `watcher`."""
        self._watchers.append(watcher)
        self._is_alone.clear()
        if self._last is not None:
            watcher.show(self._last)
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self._run)

    def remove(self, watcher: Watcher) -> None:
        """Send no more frames to `watcher`. Without watchers, polling ends. May be called twice."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        if not self._watchers:
            self._is_alone.set()

    def close(self) -> None:
        if self._greenlet is not None:
            self._greenlet.kill()
            self._greenlet = None

    def _run(self) -> None:
        polls: dict[tuple[str, str], EngineWatcher] = {}
        while self._watchers:
            due = time.monotonic() + EVERY_S
            frame = WatchFrame(at=time.time(), every_s=EVERY_S, engines=list(self._poll(polls)))
            self._last = msgspec.json.encode(frame)
            for watcher in list(self._watchers):
                watcher.show(self._last)
            self._is_alone.wait(max(0.0, due - time.monotonic()))
            if self._is_draining():
                for watcher in list(self._watchers):
                    watcher.end()
                self._watchers.clear()
        self._greenlet = self._last = None

    def _poll(self, polls: dict[tuple[str, str], EngineWatcher]) -> Iterator[EngineFrame]:
        """Ask all engines at once, and yield the frame of each. An engine that does not answer
        within EVERY_S has a frame with an error."""
        places = [
            (model, number, connection)
            for model, connections in self._list_engines()
            for number, connection in enumerate(connections)
        ]
        max_rows = max(MIN_ROWS, MAX_ROWS // max(1, len(places)))
        asked = []
        for model, number, connection in places:
            key = model, connection.client.address
            watch = polls.get(key)
            if watch is None:
                watch = polls[key] = EngineWatcher(model, connection.role, number)
            asked.append(gevent.spawn(_frame, watch, connection, max_rows))
        gevent.joinall(asked, timeout=EVERY_S)
        for (model, _, connection), greenlet in zip(places, asked, strict=True):
            if greenlet.value is None:
                greenlet.kill(block=False)
                watch = polls[model, connection.client.address]
                yield watch.fail("the engine has not answered in time")
            else:
                yield greenlet.value


def _frame(watch: EngineWatcher, connection: ConnectedEngine, max_rows: int) -> EngineFrame:
    client = connection.client
    try:
        status = client.get_status(max_rows, watch.after_step)
    except ServingError as error:
        return watch.fail(error.message)
    return watch.push(status, client.limits)
