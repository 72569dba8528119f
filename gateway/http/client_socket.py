"""The client's TCP socket during a request: detects disconnects and writes streams.

Both happen in gevent's hub and do not block. Only `SocketOutlet.run` blocks, in the request's own
greenlet. A client counts as disconnected if it closes or resets the connection, or closes its
sending half.

Each client has a buffer of its own, so a slow client does not delay others. The writer of a stream
is notified when the socket accepts no more bytes, and when the buffer is empty again
(`Outlet.watch_buffer`). So it can hold output back in the meantime. A client is disconnected if it
has read nothing for `send_timeout_s`, or if its buffer would exceed MAX_BUFFERED_BYTES.

Direct writes depend on private details of gunicorn and gevent: ALREADY_HANDLED, "gunicorn.socket"
in the WSGI environment, and a socket's `_sock`. So setup.py allows only a range of versions, whose
oldest and newest are tested (`tests/oldest.py`).
"""

from __future__ import annotations

import _socket
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gevent
from gevent import get_hub
from gevent.event import Event
from gevent.socket import wait_write
from gunicorn.workers.base_async import ALREADY_HANDLED

NOT_GUNICORN = "the server was not started with gateway/gunicorn_conf.py"
MAX_BUFFERED_BYTES = 1 << 20
"""Maximum length of the buffer for a client. A single write to an empty buffer may be longer, for
example an echoed prompt."""
DRAINED_POLL_S = 0.01
LINGER_S = 3.0
"""Longest time for which the rest of a body is read and discarded before a connection is closed."""

_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_READ = 1
"""libev's flag for a readable file descriptor."""
_LINGER_BYTES = 1 << 16
_LAST_CHUNK = b"0\r\n\r\n"
"""The end of a body in HTTP's chunked transfer coding."""


def _nothing() -> None:
    pass


def client_socket(environ: Mapping[str, Any]) -> Any | None:
    """Return the socket of a WSGI request's client. The result is None if the server does not
    expose the socket, or if the connection uses TLS."""
    sock = environ.get("gunicorn.socket")
    is_plain = type(sock) is gevent.socket.socket and environ.get("wsgi.url_scheme") == "http"
    return sock if is_plain else None


def can_take_over(environ: Mapping[str, Any]) -> bool:
    """Return whether a response can be written directly to the client's socket. It can if the
    connection is plain TCP, the request is HTTP/1.1, and gunicorn is the server."""
    return client_socket(environ) is not None and environ.get("SERVER_PROTOCOL") == "HTTP/1.1"


def takeover_obstacle(worker: Any) -> str | None:
    """Return why this gunicorn worker cannot write streams directly; None if it can.

    This is called once, at the start. It checks the private details of gunicorn and gevent that
    this module uses.
    """
    if worker.cfg.is_ssl:
        return "the connections use TLS"
    if not worker.is_already_handled(ALREADY_HANDLED):
        return "this version of gunicorn does not let a response be written by the application"
    with gevent.socket.socket() as sock:
        if not isinstance(getattr(sock, "_sock", None), _socket.socket):
            return "this version of gevent does not expose its plain sockets"
    return None


def describe_writing(obstacle: str | None) -> str:
    """Return a phrase for the log that says how streams are written.

    obstacle  why they are not written directly; None if they are. Streams for HTTP/1.0 clients
              always go through WSGI
    """
    if obstacle is None:
        return "streams: written directly to the client's socket"
    return f"streams: written through WSGI, because {obstacle}"


def linger(sock: Any) -> None:
    """End our side of a connection, and discard the data that the client still sends, until it
    closes or LINGER_S have passed.

    Closing a socket that has unread data resets the connection. The client could then lose the
    response.
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
    """Calls `then` once, in gevent's hub, when the client disconnects. The owner must call `close`.

    If bytes arrive instead, they belong to the next request. The socket is then no longer watched:
    the watcher is level-triggered, so it would fire continuously until the bytes are read.
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
        then = self.then
        self.close()
        if is_gone:
            then()

    def close(self) -> None:
        """Stop watching, and drop `then`, which may refer to this object."""
        self.then = _nothing
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None


class Outlet:
    """The output of a stream, and a buffer for output that the client has not read.

    `write` and `finish` may be called in the hub. `run`, which subclasses define, is called in the
    request's greenlet; it sends the buffer and returns at the end of the stream.

    on_overflow     called after `cut`, if the client does not read, or if sending buffered bytes
                    failed before the end of the stream
    keep_alive      written after `keep_alive_s` seconds without another write
    send_timeout_s  longest time for which the client may read nothing while output waits for it
    """

    def __init__(
        self,
        on_overflow: Callable[[], None],
        *,
        keep_alive: bytes,
        keep_alive_s: float,
        send_timeout_s: float,
    ) -> None:
        #: Whether the client is disconnected, or will be. Nothing more is written then.
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

        `on_full` is called during a `write` that the socket does not accept completely. When the
        client has read the rest, `on_room` is called in the request's greenlet; it may write.
        Neither is called after `cut`.
        """
        self._on_full, self._on_room = on_full, on_room
        return not self._buffer

    def set_keep_alive(self, data: bytes) -> None:
        """Set the bytes that are sent from now on to keep an idle stream alive."""
        self._keep_alive = data

    def write(self, data: bytes) -> None:
        """Send `data`, or buffer it. Nothing happens after `cut`."""
        if self.is_cut:
            return
        self._wrote_at = time.monotonic()
        self._put(data)

    def finish(self) -> None:
        """Mark the stream as complete: nothing more will be written."""
        self._is_finished = True
        self._wake.set()

    def cut(self) -> None:
        """Discard the buffer and write nothing more, because the client is disconnected."""
        self.is_cut = True
        self._buffer.clear()
        self.finish()

    def close(self) -> None:
        """Write nothing more, and drop the callbacks, which may refer to this outlet. The owner
        calls this when `run` has returned."""
        self.cut()
        self._on_full = self._on_room = self._on_overflow = _nothing

    def wait_drained(self) -> None:
        """Wait until the buffer is empty. A greenlet that writes more bytes than the buffer may
        hold calls this between its writes."""
        while self._buffer and not self.is_cut:
            gevent.sleep(DRAINED_POLL_S)

    def _put(self, data: bytes) -> None:
        """Add `data` to the buffer. Disconnect the client if the buffer would be too long."""
        if self._buffer and len(self._buffer) + len(data) > MAX_BUFFERED_BYTES:
            self.cut()
            self._on_overflow()
            return
        self._buffer += data
        self._wake.set()

    def _wait_for_output(self) -> None:
        """Wait until there are bytes to send or the stream has ended. In the meantime, write
        keep-alives."""
        while not self._wake.is_set():
            silent_s = time.monotonic() - self._wrote_at
            if silent_s >= self._keep_alive_s:
                self.write(self._keep_alive)
            else:
                self._wake.wait(self._keep_alive_s - silent_s)
        self._wake.clear()


class SocketOutlet(Outlet):
    """Writes a stream to the client's socket, in HTTP chunks.

    Bytes that the socket does not accept at once are buffered.

    head  status line and headers of the response
    """

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
            if self._buffer:  # the last chunk is added even to a full buffer
                self._buffer += _LAST_CHUNK
            else:
                self._write_raw(_LAST_CHUNK)
        super().finish()

    def _write_raw(self, data: bytes) -> None:
        """Send as much of `data` as the socket accepts, and buffer the rest."""
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
        """Send buffered bytes until the stream has ended and everything is sent, or until `cut`.
        This blocks. Call it in the request's greenlet."""
        while True:
            self._wait_for_output()
            self._flush()
            if self._is_finished:
                return

    def _flush(self) -> None:
        """Send the buffer. Wait whenever the socket accepts no bytes."""
        while self._buffer:
            try:
                wait_write(self._socket.fileno(), timeout=self._send_timeout_s)
                del self._buffer[: self._send(self._buffer)]
            except BlockingIOError:
                continue
            except OSError:  # the client has disconnected, or does not read (TimeoutError)
                was_finished = self._is_finished
                self.cut()
                if not was_finished:
                    self._on_overflow()
            if not self._buffer and not self.is_cut:
                self._on_room()


class IteratorOutlet(Outlet):
    """Yields a stream's bytes to any WSGI server, which adds the chunk framing itself. Bytes count
    as read by the client when the server requests the next ones."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_sending = False

    def _put(self, data: bytes) -> None:
        super()._put(data)
        if self._is_sending and not self.is_cut:
            self._on_full()

    def run(self) -> Iterator[bytes]:
        """Yield the bytes of the stream until its end."""
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
