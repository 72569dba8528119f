"""ZeroMQ sockets between processes. All other modules create them with this one, which also sets
their options.

The engine binds two ROUTER sockets, one for its clients and one for its workers. A worker that
exports K/V (kv.py) binds a ROUTER for its readers. An engine that publishes KV events
(kv_events.py) binds a PUB, and a ROUTER for replays. All other sockets are DEALERs, which connect
and may disconnect at any time.

An address is one of:

- `ipc://PATH`. The directory of the socket must be one that only its owner can enter.
- `tcp://HOST:PORT`, which always needs the cluster key (cluster_key.py) at both ends. The
  connection is encrypted, and peers without the key get no answer. Only the sockets for KV events
  have no encryption, because their subscribers are made for vLLM.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import re
import socket as system_socket
import stat
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq
from zmq.utils import z85

from protocol.wire.cluster_key import ClusterKey
from protocol.wire.codec import MAX_MESSAGE_BYTES

MAX_IPC_PATH = 107
"""Most bytes in the path of a Unix socket, without the terminating zero (man 7 unix)."""
ADAPTERS_SUFFIX = ".adapters"
"""Suffix of the file, beside a worker's socket, with the adapters that were loaded at run time."""
MEETING_FILE = "group-"
"""Start of the name of a file in which the workers of an engine meet, beside their socket."""
SEND_QUEUE = 10_000
"""Most messages queued for a peer that does not read. If the queue is full, sends fail at once,
and the peer is treated as gone.
"""
MAX_REQUEST_BYTES = 4096
"""Largest message that a socket for KV events accepts: a subscription or a request for a replay."""
LINGER_MS = 500
"""Time during which a closed socket still sends its queued messages."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1_000, 5_000
"""Interval of heartbeats, and the time after which a silent peer is disconnected. Without them, the
connection to a host that vanishes or to a process that is stopped (SIGSTOP) would stay open.
"""
_UP = zmq.EVENT_CONNECTED
_DOWN = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_EVENT_BYTES = 2
"""Length of the event number at the start of a monitor's message: zmq_socket_monitor(3). It is
decoded here, because `zmq.utils.monitor` imports asyncio, which would delay every process's start.
"""

_RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_ANY_HOST = ("*", "0.0.0.0", "[::]")
_ZAP = "inproc://zeromq.zap.01"
"""Address where libzmq requests a decision about each new peer: https://rfc.zeromq.org/spec/27/."""


def run_directory(port: int) -> Path:
    """Return the private directory of the server on HTTP port `port`, for its sockets."""
    runtime = os.environ.get(_RUNTIME_VARIABLE)
    base = Path(runtime) if runtime else Path(tempfile.gettempdir())
    return base / f"tidegate-{os.getuid()}" / str(port)


def runtime_setting() -> str:
    """Return the setting of the environment that decides where run directories are, such as
    "XDG_RUNTIME_DIR=/run/user/1000"; "" if it is not set, and they are in the temporary folder."""
    runtime = os.environ.get(_RUNTIME_VARIABLE)
    return f"{_RUNTIME_VARIABLE}={runtime}" if runtime else ""


def engine_address(port: int = 8000) -> str:
    """Return the address of the engine of the server on HTTP port `port`."""
    return f"ipc://{run_directory(port) / 'engine.sock'}"


def checked_engine_address(port: int = 8000) -> str:
    """Return `engine_address(port)`, after checking that it is safe to connect to.

    Raises PermissionError if the directory of this user's servers exists and is not private: its
    sockets may be those of another user, who would receive the prompts.
    """
    with contextlib.suppress(FileNotFoundError):
        check_private(run_directory(port).parent)
    return engine_address(port)


def make_private(directory: Path) -> None:
    """Create `directory` and its parent with mode 0700. Raises PermissionError if one of them
    exists and is not private (`check_private`)."""
    for path in (directory.parent, directory):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(path)


def check_private(path: Path) -> None:
    """Check that `path` is a directory that only this user can enter, and not a symbolic link.
    Raises PermissionError if it is not, and FileNotFoundError if it does not exist.

    Anyone may create a directory in /tmp with the name that Tidegate uses. Check it before anything
    in it is read.
    """
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(
            f"{path} must be a directory that only its owner can enter (mode 0700)"
        )


def make_ipc_directory(address: str) -> None:
    """Create the private directory of an ipc address, before a socket is bound there."""
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
    """Return a ROUTER that is bound to `address`.

    key          cluster key that TCP peers must have
    send_queue   most messages queued for a peer that does not read
    heartbeat    disconnect a peer that is stopped (SIGSTOP) for HEARTBEAT_TIMEOUT_MS; always on for
                 TCP. Threads of libzmq send and answer heartbeats, so a peer that is only busy
                 stays connected

    Sending to a peer that is gone raises zmq.ZMQError (EHOSTUNREACH). This function raises
    ValueError as `check_address` does.
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


def bind_publisher(
    context: zmq.Context[zmq.Socket[bytes]], address: str, *, plain_tcp: bool, send_queue: int
) -> zmq.Socket[bytes]:
    """Return a PUB that is bound to `address`.

    plain_tcp    whether other hosts may connect, without encryption
    send_queue   most messages queued for a subscriber that does not read. Further messages to this
                 subscriber are dropped; sending never blocks

    Raises ValueError as `check_plain_address` does.
    """
    return _bind_plain(context, zmq.PUB, address, plain_tcp=plain_tcp, send_queue=send_queue)


def bind_replay(
    context: zmq.Context[zmq.Socket[bytes]], address: str, *, plain_tcp: bool, send_queue: int
) -> zmq.Socket[bytes]:
    """Return a ROUTER for replays that is bound to `address`; parameters as in `bind_publisher`.

    Sending raises zmq.ZMQError if the peer is gone (EHOSTUNREACH) or its queue is full (EAGAIN).
    """
    return _bind_plain(context, zmq.ROUTER, address, plain_tcp=plain_tcp, send_queue=send_queue)


def _bind_plain(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    address: str,
    *,
    plain_tcp: bool,
    send_queue: int,
) -> zmq.Socket[bytes]:
    path = check_plain_address(address, plain_tcp=plain_tcp)
    socket = _socket(context, kind)
    socket.setsockopt(zmq.SNDHWM, send_queue)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDTIMEO, 0)
    if path is None:
        _set_up_tcp(socket, address)
    else:
        make_ipc_directory(address)
        path.unlink(missing_ok=True)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ValueError(f"address {address}: {error.strerror}") from None
    if path is not None:
        path.chmod(0o600)
    return socket


def socket_pair(
    context: zmq.Context[zmq.Socket[bytes]], name: str
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return two sockets of this process, through which one thread sends messages to another: the
    sending one, which never blocks (zmq.Again if the queue is full), and the receiving one.

    name   unique name of the pair in the context
    """
    receiving, sending = _socket(context, zmq.PULL), _socket(context, zmq.PUSH)
    receiving.bind(f"inproc://{name}")
    sending.connect(f"inproc://{name}")
    sending.setsockopt(zmq.SNDTIMEO, 0)
    return sending, receiving


def also_bind(
    context: zmq.Context[zmq.Socket[bytes]],
    socket: zmq.Socket[bytes],
    address: str,
    key: ClusterKey | None,
) -> None:
    """Bind a ROUTER of `bind_router`, whose address is ipc, to a TCP address, too. Peers there need
    the key; those of the ipc address do not. Raises ValueError as `check_address` does."""
    if check_address(address, key) is not None:
        raise ValueError(f"address {address!r}: other machines need tcp://HOST:PORT")
    _secure_server(context, socket, address, key)  # options apply to later calls of `bind` only
    socket.bind(address)


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """The system socket that connects a ROUTER with one of its peers."""

    descriptor: int
    inode: int  #: identifies the socket, because the number of a descriptor can be reused

    @classmethod
    def from_frame(cls, frame: zmq.Frame) -> Self | None:
        """Return the connection on which `frame` arrived; None if it is closed already."""
        descriptor = int(frame.get("__fd"))
        try:
            return cls(descriptor, os.fstat(descriptor).st_ino)
        except OSError:
            return None

    def shut_down(self) -> None:
        """End the connection. libzmq then frees the messages queued for the peer, after LINGER_MS.

        Heartbeats do not end the connection of a peer that reads nothing. The PING waits in the
        queue after the unread bytes, and its timeout starts only when it is sent.
        """
        family, kind = system_socket.AF_UNSPEC, system_socket.SOCK_STREAM
        with (
            contextlib.suppress(OSError),  # the connection is closed already
            # A duplicate of the descriptor, which cannot be reused for another file meanwhile.
            system_socket.fromfd(self.descriptor, family, kind) as own,
        ):
            if os.fstat(own.fileno()).st_ino == self.inode:
                own.shutdown(system_socket.SHUT_RDWR)


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None = None
) -> zmq.Socket[bytes]:
    """Return a DEALER that connects to `address` when a process binds it, and reconnects when that
    process restarts.

    Messages sent while no engine is there are queued for the next one. This does no harm, because
    an engine refuses all messages of a client before its Hello. ZMQ_IMMEDIATE would not queue them,
    but it also drops received messages at a disconnect, such as the last ones of the engine.

    Raises ValueError as `check_address` does.
    """
    socket = _dealer(context, address, key)
    socket.connect(address)
    return socket


def connect_monitored(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None = None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return a DEALER as `connect_dealer` does, and a monitor of its connection. Close both with
    `close_monitored`."""
    socket = _dealer(context, address, key)
    monitor = socket.get_monitor_socket(_UP | _DOWN)
    socket.connect(address)
    return socket, monitor


def read_connection_events(monitor: zmq.Socket[bytes]) -> list[bool]:
    """Return the changes of the connection since the last call, without waiting: True for each time
    that it was established, False for each time that it was lost or could not be established.

    Messages that arrived before the loss can still be received.
    """
    events = []
    while monitor.poll(0):
        event, _address = monitor.recv_multipart()
        events.append(bool(int.from_bytes(event[:_EVENT_BYTES], sys.byteorder) & _UP))
    return events


def close_monitored(
    socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], *, linger_ms: int = LINGER_MS
) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=linger_ms)


def _dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None
) -> zmq.Socket[bytes]:
    """Return a DEALER that is not connected yet."""
    path = check_address(address, key)
    if not is_connectable(address):
        raise ValueError(f"address {address!r}: a wildcard is not a host to connect to")
    socket = _socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if path is None:
        _secure_client(socket, address, key)
    return socket


def check_address(address: str, key: ClusterKey | None = None) -> Path | None:
    """Return the path of an ipc address; None for TCP. Raises ValueError for another transport, a
    path that is too long, a malformed host or port, or TCP without a key."""
    path = _check_form(address)
    if path is None and key is None:
        raise ValueError(f"address {address}: TCP needs a cluster key (tidegate cluster-key FILE)")
    return path


def check_plain_address(address: str, *, plain_tcp: bool) -> Path | None:
    """Return the path of an ipc address; None for TCP. Raises ValueError as `check_address` does,
    except that TCP needs no key. Instead, the host must be one of this machine's loopback
    interface, or `plain_tcp` must be true."""
    path = _check_form(address)
    if path is None and not plain_tcp and not _is_loopback(address):
        raise ValueError(
            f"address {address}: other hosts could read the token ids of prompts. Use "
            "tcp://127.0.0.1:PORT, or allow this with --kv-events-plain-tcp"
        )
    return path


def _is_loopback(address: str) -> bool:
    """Return whether a TCP address can be reached from this host only."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_form(address: str) -> Path | None:
    """Return the path of an ipc address; None for TCP. Raises ValueError if it is malformed."""
    transport, _, path = address.partition("://")
    if transport == "tcp":
        found = _TCP.fullmatch(address)
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            raise ValueError(f"address {address!r}: TCP addresses are tcp://HOST:PORT")
        return None
    if transport != "ipc" or not path:
        raise ValueError(f"address {address!r}: only ipc://PATH and tcp://HOST:PORT are supported")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(f"socket path {path} is longer than {MAX_IPC_PATH} bytes")
    return Path(path)


def is_connectable(address: str) -> bool:
    """Return whether a socket can connect to `address`. "tcp://0.0.0.0:5600" can only be bound."""
    return not address.startswith(tuple(f"tcp://{host}:" for host in _ANY_HOST))


def next_port(address: str) -> str:
    """Return a TCP address with the port after that of `address`."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def with_host_of(address: str, reached: str) -> str:
    """Return the TCP address `address`. If its host is a wildcard, use that of `reached`, which is
    an address of the same machine."""
    if is_connectable(address):
        return address
    return f"{reached.rpartition(':')[0]}:{address.rpartition(':')[2]}"


def local_address(address: str) -> str:
    """Return the address at which a program on this host reaches a socket bound to `address`."""
    if is_connectable(address):
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


# ---- TCP: CURVE, with the key pairs that are derived from the cluster key


def _secure_server(
    context: zmq.Context[zmq.Socket[bytes]],
    socket: zmq.Socket[bytes],
    address: str,
    key: ClusterKey | None,
) -> None:
    assert key is not None  # by `check_address`
    _set_up_tcp(socket, address)
    _start_admission(context)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.server.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, key.client.public)  # the public key to admit; see `_admit`
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # refuse all peers if ZAP does not answer


def _secure_client(socket: zmq.Socket[bytes], address: str, key: ClusterKey | None) -> None:
    assert key is not None  # by `check_address`
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
    """Start the thread that runs `_admit` for a context, unless it runs already."""
    # Through a shadow context, no other code closes the socket while the thread uses it.
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    socket = shadow.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(_ZAP)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno != errno.EADDRINUSE:  # the thread runs already
            raise
        return
    threading.Thread(target=_admit, args=(socket,), name="admission", daemon=True).start()


def _admit(socket: zmq.Socket[bytes]) -> None:
    """Answer the ZAP requests of libzmq, until the context ends. A peer is admitted if its public
    key is the ZAP domain of the socket that it connects to."""
    with socket, contextlib.suppress(zmq.ContextTerminated):
        while True:
            version, number, domain, _host, _name, mechanism, *keys = socket.recv_multipart()
            is_admitted = mechanism == b"CURVE" and hmac.compare_digest(domain, z85.encode(*keys))
            status = [b"200", b"OK"] if is_admitted else [b"400", b"not of this cluster"]
            socket.send_multipart([version, number, *status, b"", b""])
