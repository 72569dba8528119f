"""The only place that makes ZeroMQ sockets and sets their options.

Who binds: the engine, always (a ROUTER for clients, a ROUTER for its workers). Everybody else
connects a DEALER, so any of them can come and go. Addresses are `ipc://` paths in a directory that
only its owner can enter; a path that others could write to is refused.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import zmq

from protocol.wire import MAX_MESSAGE_BYTES

MAX_IPC_PATH = 107
"""sockaddr_un holds so many bytes and a terminating zero (man 7 unix)."""
SEND_QUEUE = 10_000
"""Frames kept for a peer that does not read; beyond, sends fail at once and the peer counts as
gone.
"""
LINGER_MS = 500
"""A closing socket delivers last words for so long."""


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


def bind_router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's end. Sending to a peer that is gone raises zmq.ZMQError (EHOSTUNREACH)."""
    path = _checked(address)
    path.unlink(missing_ok=True)
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(address)
    path.chmod(0o600)
    return socket


def connect_dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A client's or a worker's end. Connects when the engine appears, reconnects when it restarts.

    What is said while there is no engine waits for the next one. That does no harm: an engine knows
    a client only after its Hello, and refuses the rest. (ZMQ_IMMEDIATE would avoid it, but drops,
    at a disconnect, what came in and was not yet read: the engine's last words.)
    """
    _checked(address)
    socket = _socket(context, zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(address)
    return socket


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    socket.setsockopt(zmq.RCVHWM, SEND_QUEUE)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    return socket


def _checked(address: str) -> Path:
    """The file of an ipc address. Raises ValueError on any other transport or an overlong path."""
    transport, _, path = address.partition("://")
    if transport != "ipc" or not path:
        raise ValueError(f"address {address!r}: only ipc://PATH is supported")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(f"socket path {path} is longer than {MAX_IPC_PATH} bytes")
    return Path(path)
