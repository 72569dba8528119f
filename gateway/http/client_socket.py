"""The client's TCP socket while a request is open: noticing a hang-up, writing a stream to it.

Both are done from gevent's hub, so nothing here blocks except in the request's own greenlet
(`SocketOutlet.run`). A client that closes, resets, or closes its sending half is gone. A client
that does not read is cut off when more than MAX_BUFFERED_BYTES wait for it, or when it has taken
nothing of what waits for `send_timeout_s`. What waits for one client waits in its own outlet: the
others' bytes go past it. Whoever writes is told when bytes begin to wait, and when all are taken
(`Outlet.heed`), so that what comes meanwhile need not become bytes yet.
"""

from __future__ import annotations

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

MAX_BUFFERED_BYTES = 1 << 20
"""A single write may be longer, where nothing waits before it: an echoed prompt is one."""
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
    """The gevent socket under a WSGI request, where the server shows it and it is plain TCP."""
    sock = environ.get("gunicorn.socket")
    is_plain = type(sock) is gevent.socket.socket and environ.get("wsgi.url_scheme") == "http"
    return sock if is_plain else None


def can_take_over(environ: Mapping[str, Any]) -> bool:
    """Whether we may write the response ourselves: HTTP/1.1 on a socket of our own."""
    return client_socket(environ) is not None and environ.get("SERVER_PROTOCOL") == "HTTP/1.1"


def linger(sock: Any) -> None:
    """Before a connection is closed on a client that still sends: it would lose our answer if what
    it sends were not taken. Until it has read it and closes, but not for ever."""
    until = time.monotonic() + LINGER_S
    with contextlib.suppress(OSError):  # TimeoutError is one; a client that is gone needs no more
        sock.shutdown(socket.SHUT_WR)
        while (left_s := until - time.monotonic()) > 0:
            sock.settimeout(left_s)
            if not sock.recv(_LINGER_BYTES):
                return
            gevent.sleep(0)  # a client that sends without pause does not hold up the others


class HangUp:
    """Calls `then`, once and from the hub, when the client hangs up. To be closed in the end.

    Bytes that come instead belong to the next request: watching ends there, since a level-triggered
    watcher would fire for them without pause.
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
    """Connections before their first request and between two: a drain closes them rather than
    wait."""

    def __init__(self) -> None:
        # From when on each may be closed (time.monotonic).
        self._sockets: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def opened(self, sock: Any) -> None:
        """Who connects is about to ask, and would not try again as one does whose connection has
        been idle: time for one request to come in, and to be refused in words."""
        self._sockets[sock] = time.monotonic() + FIRST_REQUEST_S

    def add(self, sock: Any) -> None:
        if sock is not None:
            self._sockets[sock] = 0.0

    def discard(self, sock: Any) -> None:
        self._sockets.pop(sock, None)

    def close(self) -> None:
        """The server, which waits for the next request, reads the end of the connection. It would
        be told of an error by gevent's own `shutdown`, which wakes whoever waits, and log it."""
        now = time.monotonic()
        for sock in [each for each, due in self._sockets.items() if due <= now]:
            self.discard(sock)
            with contextlib.suppress(OSError):
                sock._sock.shutdown(socket.SHUT_RDWR)


class Outlet:
    """Where a stream's bytes go. `write` and `finish` may be called from the hub; `run` drives it.

    on_overflow     called when the client is cut off because it does not read
    keep_alive      what `run` writes after `keep_alive_s` of silence, at first
    send_timeout_s  how long it may take nothing of what waits for it
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

    def heed(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> bool:
        """`on_full` is called, within `write`, when the client has not taken all that was written;
        then `on_room`, which may write, from the request's greenlet, when it has. Neither after
        the client was cut off. True: all has been taken so far."""
        self._on_full, self._on_room = on_full, on_room
        return not self._buffer

    def keep_alive_with(self, data: bytes) -> None:
        """Write `data` instead from now on, when nothing else is written."""
        self._keep_alive = data

    def write(self, data: bytes) -> None:
        if self.is_cut:
            return
        self._wrote_at = time.monotonic()
        self._put(data)

    def finish(self) -> None:
        """Nothing more will be written."""
        self._is_finished = True
        self._wake.set()

    def cut(self) -> None:
        """The client is gone, or is to be: drop what waits, write nothing more."""
        self.is_cut = True
        self._buffer.clear()
        self.finish()

    def await_room(self) -> None:
        """Until nothing waits to be sent. For a greenlet that writes more than fits at once."""
        while self._buffer and not self.is_cut:
            gevent.sleep(ROOM_POLL_S)

    def _put(self, data: bytes) -> None:
        if self._buffer and len(self._buffer) + len(data) > MAX_BUFFERED_BYTES:
            self.cut()
            self._on_overflow()
            return
        self._buffer += data
        self._wake.set()

    def _await_news(self) -> None:
        """Until there are bytes to send, or the end has come; writes keep-alives meanwhile."""
        while not self._wake.is_set():
            silent_s = time.monotonic() - self._wrote_at
            if silent_s >= self._keep_alive_s:
                self.write(self._keep_alive)
            else:
                self._wake.wait(self._keep_alive_s - silent_s)
        self._wake.clear()


class SocketOutlet(Outlet):
    """Writes straight to the socket, in HTTP chunks; only what it does not take waits here."""

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
            if self._buffer:  # however much it is
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
        """Block until all is sent, or the client is cut off. For the request's greenlet."""
        while True:
            self._await_news()
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
            except OSError:  # gone, or (TimeoutError) not reading
                was_finished = self._is_finished
                self.cut()
                if not was_finished:
                    self._on_overflow()
            if not self._buffer and not self.is_cut:
                self._on_room()


class IteratorOutlet(Outlet):
    """The same bytes for any WSGI server, which iterates and frames them itself. While it does not
    come for more, it waits until its client takes what it has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_sending = False

    def _put(self, data: bytes) -> None:
        super()._put(data)
        if self._is_sending and not self.is_cut:
            self._on_full()

    def run(self) -> Iterator[bytes]:
        while True:
            self._await_news()
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
