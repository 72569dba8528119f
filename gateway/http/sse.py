"""Server-sent events: how a frame looks, and the response that sends a stream of them.

Where the client's socket can be had (gunicorn, HTTP/1.1), the response takes it over: frames are
written from the engine client's dispatcher, and gunicorn is told that the request is handled.
Elsewhere a generator yields the same bytes. Nothing is sent before the view has returned the
response, so whatever can be refused has been refused with a status of its own.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import flask
from gunicorn.workers.base_async import ALREADY_HANDLED
from werkzeug.datastructures import Headers
from werkzeug.http import http_date

from gateway.http.client_socket import (
    IteratorOutlet,
    Outlet,
    SocketOutlet,
    can_take_over,
    client_socket,
)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def frame(data: bytes) -> bytes:
    """`data` is JSON without line breaks, as msgspec writes it."""
    return b"data: " + data + b"\n\n"


class EventStream(flask.Response):
    """attach      called with the outlet when the stream begins: from then on frames are written
    abandon     called when the client has gone or does not read; after the end, without need
    close       called when all is over: sent, cut off or gone
    closing     asked at the end: whether the connection is to be closed, too
    keep_alive_s     after so long a silence a comment is sent, unless the outlet is told otherwise
    send_timeout_s   a client that takes nothing for so long is cut off
    """

    def __init__(
        self,
        attach: Callable[[Outlet], None],
        *,
        abandon: Callable[[], None],
        close: Callable[[], None],
        closing: Callable[[], bool],
        keep_alive_s: float,
        send_timeout_s: float,
    ) -> None:
        super().__init__(content_type="text/event-stream; charset=utf-8")
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # nginx would collect the stream otherwise
        self._attach = attach
        self._abandon = abandon
        self._close = close
        self._closing = closing
        self._outlet: Outlet | None = None
        self._options: dict[str, Any] = {
            "on_overflow": abandon,
            "keep_alive": KEEP_ALIVE,
            "keep_alive_s": keep_alive_s,
            "send_timeout_s": send_timeout_s,
        }

    def hang_up(self) -> None:
        """The client has gone. May be called from the hub."""
        self._abandon()
        if self._outlet is not None:
            self._outlet.cut()

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        if can_take_over(environ):
            self._take_over(client_socket(environ))
            return cast("Iterable[bytes]", ALREADY_HANDLED)
        self.response = self._generate()
        self.call_on_close(self._abandon)
        self.call_on_close(self._close)
        body: Iterable[bytes] = super().__call__(environ, start_response)
        return body

    def _take_over(self, sock: Any) -> None:
        outlet = self._outlet = SocketOutlet(sock, self._head(), **self._options)
        is_whole = False
        try:
            self._attach(outlet)
            outlet.run()
            is_whole = not outlet.is_cut
        finally:
            if outlet.is_cut:  # noticed by writing, perhaps
                self._abandon()
            self._close()
            if not is_whole or self._closing():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # gunicorn reads the end, and closes

    def _head(self) -> bytes:
        """The response's head as gunicorn would have sent it."""
        headers = Headers(self.headers)
        headers.remove("Content-Length")
        headers["Transfer-Encoding"] = "chunked"
        headers["Date"] = http_date()
        headers["Connection"] = "close" if self._closing() else "keep-alive"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        return f"HTTP/1.1 {self.status}\r\n{lines}\r\n".encode("latin-1")

    def _generate(self) -> Iterator[bytes]:
        outlet = self._outlet = IteratorOutlet(**self._options)
        self._attach(outlet)
        yield from outlet.run()
