"""The watch over the connection of a worker that has joined an engine on another machine."""

from __future__ import annotations

import threading
from collections import deque

import pytest
import zmq

from protocol.wire import sockets
from tests.support.waiting import HANG_S, eventually
from worker.service import connection
from worker.service.connection import EngineWatch


def test_a_loss_that_is_read_before_the_worker_has_joined_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other event follows, as if each new attempt to connect took long."""
    events, ended = deque([[True], [False]]), threading.Event()
    monkeypatch.setattr(
        sockets, "read_connection_events", lambda monitor: events.popleft() if events else []
    )
    monkeypatch.setattr(connection, "WATCH_MS", 1)
    monkeypatch.setattr(EngineWatch, "_end", lambda watch: ended.set())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    watch = EngineWatch(context, "ipc:///nowhere", None)
    assert eventually(lambda: not events)
    assert not ended.is_set()
    watch.has_joined.set()
    assert ended.wait(HANG_S)
    watch.close()
    context.term()
