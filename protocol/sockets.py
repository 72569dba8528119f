"""The only place that makes ZeroMQ sockets and sets their options.

Who binds: the engine, always (a ROUTER for clients, a ROUTER for its workers), and the worker whose
K/V others fetch (kv.py). Everybody else connects a DEALER, so any of them can come and go.

An address is an `ipc://` path in a directory that only its owner can enter; a path that others
could write to is refused. Or it is `tcp://HOST:PORT`, with a cluster key (cluster_key.py) at both
ends: then all is encrypted, and who has not the key is not answered. There is no TCP without a key.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import re
import socket as system_socket
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from protocol.cluster_key import ClusterKey
from protocol.wire import MAX_MESSAGE_BYTES

MAX_IPC_PATH = 107
"""sockaddr_un holds so many bytes and a terminating zero (man 7 unix)."""
SEND_QUEUE = 10_000
"""Frames kept for a peer that does not read; beyond, sends fail at once and the peer counts as
gone.
"""
LINGER_MS = 500
"""A closing socket delivers last words for so long."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1_000, 5_000
"""A host that vanishes, or a process that is stopped, closes no connection."""
_UP = zmq.EVENT_CONNECTED
_DOWN = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_ANY_HOST = ("*", "0.0.0.0", "[::]")
_ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks whether to admit a peer: https://rfc.zeromq.org/spec/27/."""


def run_directory(port: int) -> Path:
    """The private directory of the server on HTTP port `port`: its sockets live here.

    Not created.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime else Path(tempfile.gettempdir())
    return base / f"tidegate-{os.getuid()}" / str(port)


def engine_address(port: int = 8000) -> str:
    """Where clients find the engine of the server on HTTP port `port`."""
    return f"ipc://{run_directory(port) / 'engine.sock'}"


def make_private(directory: Path) -> None:
    """Create `directory` and its parent with mode 0700; refuse one that another user made or may
    enter.
    """
    for path in (directory.parent, directory):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise PermissionError(
                f"{path} must be a directory that only its owner can enter (mode 0700)"
            )


def prepare(address: str) -> None:
    """Make the directory of an ipc address, private, before something is bound there."""
    if address.startswith("ipc://"):
        make_private(Path(address.removeprefix("ipc://")).parent)


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    key: ClusterKey | None = None,
    *,
    send_queue: int = SEND_QUEUE,
    heartbeat: bool = False,
) -> zmq.Socket[bytes]:
    """The end that waits for others. Sending to a peer that is gone raises zmq.ZMQError
    (EHOSTUNREACH).

    On TCP only those who hold `key` are heard. Raises ValueError as `check_address` does.
    send_queue   messages kept for a peer that does not read
    heartbeat    the connection of a peer that is stopped breaks after HEARTBEAT_TIMEOUT_MS; always
                 so on TCP. libzmq's own threads see to it at both ends, so a peer whose program is
                 busy keeps its connection
    """
    path = check_address(address, key)
    socket = _socket(context, zmq.ROUTER)
    if heartbeat:
        _set_up_heartbeat(socket)
    socket.setsockopt(zmq.SNDHWM, send_queue)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if path is None:
        _secure_server(context, socket, address, key)
        socket.bind(address)
        return socket
    path.unlink(missing_ok=True)
    socket.bind(address)
    path.chmod(0o600)
    return socket


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """The system's socket under the connection of a ROUTER's peer. A descriptor may come to mean
    another file, its inode does not."""

    descriptor: int
    inode: int

    @classmethod
    def from_frame(cls, frame: zmq.Frame) -> Self | None:
        """Return the connection that `frame` came by; None if it is closed already."""
        descriptor = int(frame.get("__fd"))
        try:
            return cls(descriptor, os.fstat(descriptor).st_ino)
        except OSError:
            return None

    def shut_down(self) -> None:
        """End the connection. libzmq then frees what is queued for the peer, after LINGER_MS. Its
        own heartbeat does not end the connection of a peer that reads nothing: a PING waits behind
        the bytes that are not read, and the timeout starts when it is sent."""
        family, kind = system_socket.AF_UNSPEC, system_socket.SOCK_STREAM
        with (
            contextlib.suppress(OSError),  # it is closed
            # A descriptor of our own, which cannot come to mean another file.
            system_socket.fromfd(self.descriptor, family, kind) as own,
        ):
            if os.fstat(own.fileno()).st_ino == self.inode:
                own.shutdown(system_socket.SHUT_RDWR)


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None = None
) -> zmq.Socket[bytes]:
    """A client's or a worker's end. Connects when the engine appears, reconnects when it restarts.

    What is said while there is no engine waits for the next one. That does no harm: an engine knows
    a client only after its Hello, and refuses the rest. (ZMQ_IMMEDIATE would avoid it, but drops,
    at a disconnect, what came in and was not yet read: the engine's last words.)

    Raises ValueError as `check_address` does.
    """
    socket = _dealer(context, address, key)
    socket.connect(address)
    return socket


def connect_watched(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None = None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """As `connect_dealer`, and a second socket to hear of the connection by: see `connection_news`.
    To be closed by `close_watched`."""
    socket = _dealer(context, address, key)
    watcher = socket.get_monitor_socket(_UP | _DOWN)
    socket.connect(address)
    return socket, watcher


def connection_news(watcher: zmq.Socket[bytes]) -> list[bool]:
    """What has become of the connection since the last time, without waiting: True, there is one;
    False, there is none, or none any more. What came in before it broke can still be read."""
    news = []
    while watcher.poll(0):
        news.append(bool(recv_monitor_message(watcher)["event"] & _UP))
    return news


def close_watched(
    socket: zmq.Socket[bytes], watcher: zmq.Socket[bytes], *, linger_ms: int = LINGER_MS
) -> None:
    socket.disable_monitor()
    watcher.close(linger=0)
    socket.close(linger=linger_ms)


def _dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None
) -> zmq.Socket[bytes]:
    """Not connected."""
    path = check_address(address, key)
    if not names_a_host(address):
        raise ValueError(f"address {address!r}: it names no host to connect to")
    socket = _socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if path is None:
        _secure_client(socket, address, key)
    return socket


def check_address(address: str, key: ClusterKey | None = None) -> Path | None:
    """The file of an ipc address; None for TCP.

    Raises ValueError on any other transport, an overlong path, a malformed host or port, and TCP
    without a key.
    """
    transport, _, path = address.partition("://")
    if transport == "tcp":
        found = _TCP.fullmatch(address)
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            raise ValueError(f"address {address!r}: TCP addresses are tcp://HOST:PORT")
        if key is None:
            raise ValueError(f"address {address}: TCP needs a cluster key (tidegate key FILE)")
        return None
    if transport != "ipc" or not path:
        raise ValueError(f"address {address!r}: only ipc://PATH and tcp://HOST:PORT are supported")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(f"socket path {path} is longer than {MAX_IPC_PATH} bytes")
    return Path(path)


def names_a_host(address: str) -> bool:
    """Whether others could connect there: not so "tcp://0.0.0.0:5600", which is good to bind."""
    return not address.startswith(tuple(f"tcp://{host}:" for host in _ANY_HOST))


def local_address(address: str) -> str:
    """Where a program on this host reaches what is bound to `address`."""
    if names_a_host(address):
        return address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return f"tcp://{'[::1]' if host == '[::]' else '127.0.0.1'}:{port}"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


# ---- TCP: CURVE, with the key pairs that follow from the cluster's key


def _secure_server(
    context: zmq.Context[zmq.Socket[bytes]],
    socket: zmq.Socket[bytes],
    address: str,
    key: ClusterKey | None,
) -> None:
    assert key is not None  # check_address
    _set_up_tcp(socket, address)
    _start_admission(context)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.server.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, key.client.public)  # whom to admit; see `_admit`
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody, if nobody answers there


def _secure_client(socket: zmq.Socket[bytes], address: str, key: ClusterKey | None) -> None:
    assert key is not None  # check_address
    _set_up_tcp(socket, address)
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, key.client.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.client.secret)


def _set_up_tcp(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.IPV6, int("[" in address))
    _set_up_heartbeat(socket)


def _set_up_heartbeat(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def _start_admission(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """One thread per context, which ends with it. Its socket belongs to a shadow, so that nobody
    else closes it while it waits there."""
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    socket = shadow.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(_ZAP)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno != errno.EADDRINUSE:  # it runs already
            raise
        return
    threading.Thread(target=_admit, args=(socket,), name="admission", daemon=True).start()


def _admit(socket: zmq.Socket[bytes]) -> None:
    """Answer libzmq until the context ends: a peer is admitted whose public key is the one that the
    socket it came to has for its domain."""
    with socket, contextlib.suppress(zmq.ContextTerminated):
        while True:
            version, number, domain, _host, _name, mechanism, *keys = socket.recv_multipart()
            is_one_of_us = mechanism == b"CURVE" and hmac.compare_digest(domain, z85.encode(*keys))
            verdict = [b"200", b"OK"] if is_one_of_us else [b"400", b"not of this cluster"]
            socket.send_multipart([version, number, *verdict, b"", b""])
