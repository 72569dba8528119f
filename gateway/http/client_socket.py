"""The client's TCP socket during a request: detects disconnects and writes streams.

Both happen in gevent's hub, so only `SocketOutlet.run` blocks, in the request's own greenlet. A
client that closes or resets the connection, or closes its sending half, counts as disconnected. A
client that does not read is disconnected if more than MAX_BUFFERED_BYTES wait for it, or if it has
read nothing for `send_timeout_s`. Each client has a buffer of its own, so a slow client does not
delay others. The writer is notified when the buffer fills and when it is empty again
(`Outlet.watch_buffer`), so that it can hold output back.

Direct writes rest on private details of gunicorn and gevent: ALREADY_HANDLED, "gunicorn.socket" in
the environ, and a socket's `_sock`. So setup.py allows only versions whose oldest and newest are
tested (`tests/oldest.py`).
"""

from __future__ import annotations

import _socket
import contextlib
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gevent
from gevent import get_hub
from gevent.event import Event
from gevent.socket import wait_write
from gunicorn.workers.base_async import ALREADY_HANDLED

NOT_GUNICORN = "the server was not started with gateway/gunicorn_conf.py"
MAX_BUFFERED_BYTES = 1 << 20
"""A single write to an empty buffer may be longer, for example an echoed prompt."""
ROOM_POLL_S = 0.01
LINGER_S = 3.0
FIRST_REQUEST_S = 1.0

_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_READ = 1
_LINGER_BYTES = 1 << 16
_LAST_CHUNK = b"0\r\n\r\n"


def _nothing() -> None:
    pass


def client_socket(environ: Mapping[str, Any]) -> Any | None:
    """Return the gevent socket of a WSGI request, if the server exposes it and it is plain TCP."""
    sock = environ.get("gunicorn.socket")
    is_plain = type(sock) is gevent.socket.socket and environ.get("wsgi.url_scheme") == "http"
    return sock if is_plain else None


def can_take_over(environ: Mapping[str, Any]) -> bool:
    """Return whether the response may be written directly to the socket: HTTP/1.1 on plain TCP."""
    return client_socket(environ) is not None and environ.get("SERVER_PROTOCOL") == "HTTP/1.1"


def takeover_obstacle(worker: Any) -> str | None:
    """Return why streams on this gunicorn worker go through WSGI; None if nothing prevents direct
    writes. This checks, at the start, the private details of gunicorn and gevent used here."""
    if worker.cfg.is_ssl:
        return "the connections use TLS"
    if not worker.is_already_handled(ALREADY_HANDLED):
        return "this version of gunicorn does not let a response be written by the application"
    with gevent.socket.socket() as sock:
        if not isinstance(getattr(sock, "_sock", None), _socket.socket):
            return "this version of gevent does not expose its plain sockets"
    return None


def describe_writing(obstacle: str | None) -> str:
    """Return the log line about how streams are written. HTTP/1.0 always goes through WSGI."""
    if obstacle is None:
        return "streams: written directly to the client's socket"
    return f"streams: written through WSGI, because {obstacle}"


def linger(sock: Any) -> None:
    """Read and discard what the client still sends, until it closes or LINGER_S have passed.

    Closing a socket with unread data resets the connection, and the client would lose the response.
    """
    until = time.monotonic() + LINGER_S
    with contextlib.suppress(OSError):  # includes TimeoutError
        sock.shutdown(socket.SHUT_WR)
        while (left_s := until - time.monotonic()) > 0:
            sock.settimeout(left_s)
            if not sock.recv(_LINGER_BYTES):
                return
            gevent.sleep(0)  # let other greenlets run if the client sends without pause


class HangUp:
    """Calls `then`, once and from the hub, if the client disconnects. It must be closed.

    Received bytes belong to the next request. Watching stops there, because the level-triggered
    watcher would fire continuously.
    """

    def __init__(self, environ: Mapping[str, Any], then: Callable[[], None]) -> None:
        self.then = then
        self._socket = client_socket(environ)
        self._watcher: Any = None
        if self._socket is not None:
            self._watcher = get_hub().loop.io(self._socket.fileno(), _READ)
            self._watcher.start(self._readable)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            is_gone = self._socket._sock.recv(1, _PEEK) == b""
        except BlockingIOError:
            return
        except OSError:
            is_gone = True
        self.close()
        if is_gone:
            self.then()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None


class IdleConnections:
    """Connections without a request in progress. A drain closes them instead of waiting."""

    def __init__(self) -> None:
        # The earliest time at which each may be closed (time.monotonic).
        self._sockets: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def opened(self, sock: Any) -> None:
        """Add a new connection, which gets FIRST_REQUEST_S for its first request.

        Clients retry after an idle connection is closed, but not after a new one is. So the first
        request is read and gets an error response.
        """
        self._sockets[sock] = time.monotonic() + FIRST_REQUEST_S

    def add(self, sock: Any) -> None:
        if sock is not None:
            self._sockets[sock] = 0.0

    def discard(self, sock: Any) -> None:
        self._sockets.pop(sock, None)

    def close(self) -> None:
        """Shut the sockets down, so that the server's pending read gets EOF.

        gevent's own `shutdown` would raise an error in that read, which the server would log.
        """
        now = time.monotonic()
        for sock in [each for each, due in self._sockets.items() if due <= now]:
            self.discard(sock)
            with contextlib.suppress(OSError):
                sock._sock.shutdown(socket.SHUT_RDWR)


class Outlet:
    """The output of a stream. `write` and `finish` may be called from the hub; `run` drives it.

    on_overflow     called when the client is disconnected because it does not read
    keep_alive      written after `keep_alive_s` of silence; see `set_keep_alive`
    send_timeout_s  longest time that the client may read nothing while output waits for it
    """

    def __init__(
        self,
        on_overflow: Callable[[], None],
        *,
        keep_alive: bytes,
        keep_alive_s: float,
        send_timeout_s: float,
    ) -> None:
        self.is_cut = False
        self._on_overflow = on_overflow
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s
        self._on_full = self._on_room = _nothing
        self._buffer = bytearray()
        self._wake = Event()
        self._is_finished = False
        self._wrote_at = time.monotonic()

    def watch_buffer(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> bool:
        """Set the callbacks for backpressure. Return whether the buffer is empty now.

        `on_full` is called within `write` if the client has not read everything. After it has,
        `on_room` is called from the request's greenlet and may write. Neither is called after
        `cut`.
        """
        self._on_full, self._on_room = on_full, on_room
        return not self._buffer

    def set_keep_alive(self, data: bytes) -> None:
        """Write `data` as the keep-alive from now on."""
        self._keep_alive = data

    def write(self, data: bytes) -> None:
        if self.is_cut:
            return
        self._wrote_at = time.monotonic()
        self._put(data)

    def finish(self) -> None:
        """Mark the stream as complete: nothing more will be written."""
        self._is_finished = True
        self._wake.set()

    def cut(self) -> None:
        """Discard the buffer and write nothing more: the client is or will be disconnected."""
        self.is_cut = True
        self._buffer.clear()
        self.finish()

    def wait_drained(self) -> None:
        """Wait until the buffer is empty. For a greenlet that writes more than the buffer holds."""
        while self._buffer and not self.is_cut:
            gevent.sleep(ROOM_POLL_S)

    def _put(self, data: bytes) -> None:
        if self._buffer and len(self._buffer) + len(data) > MAX_BUFFERED_BYTES:
            self.cut()
            self._on_overflow()
            return
        self._buffer += data
        self._wake.set()

    def _wait_for_output(self) -> None:
        """Wait for bytes to send or the end; write keep-alives in the meantime."""
        while not self._wake.is_set():
            silent_s = time.monotonic() - self._wrote_at
            if silent_s >= self._keep_alive_s:
                self.write(self._keep_alive)
            else:
                self._wake.wait(self._keep_alive_s - silent_s)
        self._wake.clear()


class SocketOutlet(Outlet):
    """Writes HTTP chunks directly to the socket and buffers what the socket does not accept."""

    def __init__(self, sock: Any, head: bytes, **options: Any) -> None:
        super().__init__(**options)
        self._socket = sock
        self._send = sock._sock.send
        self._write_raw(head)

    def write(self, data: bytes) -> None:
        if self.is_cut:
            return
        self._wrote_at = time.monotonic()
        self._write_raw(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self) -> None:
        if not self.is_cut and not self._is_finished:
            if self._buffer:  # whatever its size
                self._buffer += _LAST_CHUNK
            else:
                self._write_raw(_LAST_CHUNK)
        super().finish()

    def _write_raw(self, data: bytes) -> None:
        if self._buffer:
            self._put(data)
            return
        try:
            sent = self._send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.cut()
            return
        if sent < len(data):
            self._put(data[sent:])
            self._on_full()

    def run(self) -> None:
        """Block until everything is sent or the client is cut off. Call this in the request's
        greenlet."""
        while True:
            self._wait_for_output()
            self._flush()
            if self._is_finished:
                return

    def _flush(self) -> None:
        while self._buffer:
            try:
                wait_write(self._socket.fileno(), timeout=self._send_timeout_s)
                del self._buffer[: self._send(self._buffer)]
            except BlockingIOError:
                continue
            except OSError:  # disconnected, or not reading (TimeoutError)
                was_finished = self._is_finished
                self.cut()
                if not was_finished:
                    self._on_overflow()
            if not self._buffer and not self.is_cut:
                self._on_room()


class IteratorOutlet(Outlet):
    """Yields the same bytes to any WSGI server, which frames them itself. While the server does not
    ask for more, it is waiting for its client to read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_sending = False

    def _put(self, data: bytes) -> None:
        super()._put(data)
        if self._is_sending and not self.is_cut:
            self._on_full()

    def run(self) -> Iterator[bytes]:
        while True:
            self._wait_for_output()
            while self._buffer:
                data = bytes(self._buffer)
                self._buffer.clear()
                self._is_sending = True
                yield data
                self._is_sending = False
                if not self._buffer and not self.is_cut:
                    self._on_room()
            if self._is_finished:
                return
