"""Sockets over TCP exchange messages only with holders of the cluster key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socketpair

import pytest
import zmq

from protocol.wire import sockets
from protocol.wire.cluster_key import ClusterKey
from tests.support.ports import free_port

KEY, OTHER = ClusterKey(b"k" * 32), ClusterKey(b"o" * 32)
SOON_MS, NEVER_MS = 5_000, 300

Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    context: zmq.Context[Socket] = zmq.Context()
    yield context
    context.destroy(linger=0)


@contextmanager
def stranger(address: str, **options: int | bytes) -> Iterator[Socket]:
    """Yield a DEALER that is connected with plain pyzmq instead of `protocol.wire.sockets`."""
    context: zmq.Context[Socket] = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
        socket.connect(address)
        yield socket
    finally:
        context.destroy(linger=0)


def converse(server: Socket, client: Socket) -> None:
    """Check that each socket receives a message of the other one, and close the client."""
    with client:
        client.send(b"hello")
        assert server.poll(SOON_MS)
        name, words = server.recv_multipart()
        server.send_multipart([name, words + b" back"])
        assert client.poll(SOON_MS)
        assert client.recv() == b"hello back"


def is_ignored(server: Socket, client: Socket) -> bool:
    client.send(b"let me in")
    return not server.poll(NEVER_MS) and not client.poll(0)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_peers_with_the_same_key_exchange_messages(context: zmq.Context[Socket], host: str) -> None:
    address = f"tcp://{host}:{free_port()}"
    with sockets.bind_router(context, address, KEY) as server:
        converse(server, sockets.connect_dealer(context, address, KEY))


def test_a_client_without_the_key_is_ignored_and_the_server_continues(
    context: zmq.Context[Socket],
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    public, secret = zmq.curve_keypair()
    mine = {"CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret}
    with sockets.bind_router(context, address, KEY) as server:
        with sockets.connect_dealer(context, address, OTHER) as other:
            assert is_ignored(server, other), "another cluster's key"
        with stranger(address) as plain:
            assert is_ignored(server, plain), "no key at all"
        with stranger(address, CURVE_SERVERKEY=KEY.server.public, **mine) as curious:
            assert is_ignored(server, curious), "only what a server shows in public"
        converse(server, sockets.connect_dealer(context, address, KEY))


def test_one_context_serves_two_clusters_apart(context: zmq.Context[Socket]) -> None:
    address, other = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    theirs = {"CURVE_PUBLICKEY": KEY.client.public, "CURVE_SECRETKEY": KEY.client.secret}
    with (
        sockets.bind_router(context, address, KEY) as server,
        sockets.bind_router(context, other, OTHER) as other_server,
    ):
        converse(server, sockets.connect_dealer(context, address, KEY))
        converse(other_server, sockets.connect_dealer(context, other, OTHER))
        with stranger(other, CURVE_SERVERKEY=OTHER.server.public, **theirs) as guest:
            assert is_ignored(other_server, guest)


def test_a_context_with_a_cluster_key_can_be_terminated() -> None:
    context: zmq.Context[Socket] = zmq.Context()
    server = sockets.bind_router(context, f"tcp://127.0.0.1:{free_port()}", KEY)
    server.close()
    context.term()  # would wait for the admission's socket


def test_tcp_without_a_key_is_not_even_opened(context: zmq.Context[Socket]) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    for make in (sockets.bind_router, sockets.connect_dealer):
        with pytest.raises(ValueError, match="needs a cluster key"):
            make(context, address)


def test_an_address_without_a_host_is_refused_by_clients(context: zmq.Context[Socket]) -> None:
    for host in ("*", "0.0.0.0", "[::]"):
        with pytest.raises(ValueError, match="wildcard"):
            sockets.connect_dealer(context, f"tcp://{host}:5600", KEY)


def test_a_private_path_needs_no_key_and_a_key_does_no_harm(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    for number, key in enumerate((None, KEY)):
        address = f"ipc://{tmp_path}/{number}/s"
        sockets.make_ipc_directory(address)
        with sockets.bind_router(context, address, key) as server:
            converse(server, sockets.connect_dealer(context, address))


# ---- the connection of a peer


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_connection_that_is_shut_down_breaks_for_its_peer_alone(
    context: zmq.Context[Socket], tmp_path: Path, kind: str
) -> None:
    key = KEY if kind == "tcp" else None
    address = f"tcp://127.0.0.1:{free_port()}" if key else f"ipc://{tmp_path}/engine"
    with sockets.bind_router(context, address, key) as server:
        peers = [sockets.connect_monitored(context, address, key) for _ in range(2)]
        connections = []
        for peer, watcher in peers:
            peer.send(b"hello")
            assert server.poll(SOON_MS)
            connection = sockets.PeerConnection.from_frame(server.recv(copy=False))
            assert connection is not None
            connections.append(connection)
            server.recv()
            assert sockets.read_connection_events(watcher) == [True]
        connections[0].shut_down()
        assert peers[0][1].poll(SOON_MS)
        assert sockets.read_connection_events(peers[0][1])[0] is False
        peers[1][0].send(b"still here")
        assert server.poll(SOON_MS)
        assert server.recv_multipart()[1] == b"still here"
        assert sockets.read_connection_events(peers[1][1]) == []
        for peer, watcher in peers:
            sockets.close_monitored(peer, watcher)


def test_a_descriptor_that_another_socket_has_by_now_is_left_alone() -> None:
    near, far = socketpair()
    with near, far:
        inode = os.fstat(near.fileno()).st_ino
        sockets.PeerConnection(near.fileno(), inode + 1).shut_down()
        far.send(b"x")
        assert near.recv(1) == b"x"
        sockets.PeerConnection(near.fileno(), inode).shut_down()
        assert far.recv(1) == b""
        descriptor = near.fileno()
    sockets.PeerConnection(descriptor, inode).shut_down()  # closed: no error
