"""Idle connections are closed when there are too many, the oldest first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import gevent.socket
import pytest

from gateway.http.connections import MAX_CONNECTIONS, ClientConnections, connections_within


class FakeClients:
    """Connections to a server that accepts at most `max_open`. Each has a name."""

    def __init__(self, max_open: int, stack: contextlib.ExitStack) -> None:
        self._open = ClientConnections()
        self._open.max_open = max_open
        self._stack = stack
        self._pairs: dict[str, tuple[gevent.socket.socket, gevent.socket.socket]] = {}

    def connect(self, name: str, peer: str = "one") -> None:
        own, client = gevent.socket.socketpair()
        self._stack.enter_context(own)
        self._stack.enter_context(client)
        self._stack.enter_context(self._open.opened(own, peer))
        self._pairs[name] = own, client

    def send(self, name: str) -> None:
        self._open.start_request(self._pairs[name][0])

    def receive(self, name: str, peer: str = "one") -> None:
        self._open.end_request(self._pairs[name][0], peer)

    @property
    def closed(self) -> list[str]:
        """The names of the connections that the server has closed."""
        return [name for name, (_, client) in self._pairs.items() if _is_closed(client)]


def _is_closed(client: gevent.socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def clients() -> Iterator[FakeClients]:
    with contextlib.ExitStack() as stack:
        yield FakeClients(4, stack)


def test_the_connection_that_was_idle_for_longest_is_closed_first(clients: FakeClients) -> None:
    for number, name in enumerate("abcd"):
        clients.connect(name, f"peer {number}")
    clients.send("a")
    clients.receive("a", "peer 0")
    assert clients.closed == []
    clients.connect("e", "peer 5")
    assert clients.closed == ["b"]


def test_a_connection_with_a_request_is_not_closed(clients: FakeClients) -> None:
    for number, name in enumerate("abcd"):
        clients.connect(name, f"peer {number}")
        clients.send(name)
    clients.connect("e", "another")
    assert clients.closed == ["e"], "the only idle one"


def test_a_peer_with_half_of_the_connections_loses_its_own(clients: FakeClients) -> None:
    clients.connect("x", "modest")
    for name in "abc":
        clients.connect(name, "greedy")
    assert clients.closed == ["a"]


def test_connections_leave_room_for_other_files() -> None:
    assert connections_within(1024) == 924
    assert connections_within(1 << 20) == MAX_CONNECTIONS
    assert connections_within(64) > 0
