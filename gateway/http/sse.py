"""Server-sent events: frames, and the response that streams them. It can also stream lines of JSON.

If the client's socket is accessible (gunicorn, HTTP/1.1), the response takes the socket over.
Frames are then written to it directly, in gevent's hub, when the engine's output arrives, and
gunicorn gets ALREADY_HANDLED. Under other servers a generator yields the same bytes. In both cases
nothing is sent before the view has returned the response, so a refusal can have its own status.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
LAST_EVENT_HEADER = "Last-Event-ID"
"""Header of a client that resumes a stream: the id of the last event that it received."""


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How a stream is written."""

    content_type: str
    #: Written while nothing else is, so that proxies and clients keep the connection.
    keep_alive: bytes


EVENTS = StreamFormat("text/event-stream; charset=utf-8", KEEP_ALIVE)
JSON_LINES = StreamFormat("application/x-ndjson", b" ")
"""One JSON value per line. A space may stand before any value. Clients fail on an empty line."""


def frame(data: bytes) -> bytes:
    """Return an SSE frame. `data` is JSON without line breaks, as msgspec writes it."""
    return b"data: " + data + b"\n\n"


class EventStream(flask.Response):
    """A response that streams events.

    attach          called with the outlet when the stream starts; it starts writing frames
    abandon         called when the client disconnects or stops reading; may be called after the end
    close           called once when the stream is over, however it ended
    closing         returns whether to close the connection after the stream
    keep_alive_s    a keep-alive is sent after this many seconds without a frame
    send_timeout_s  a client that reads nothing for this many seconds is disconnected
    form            what is streamed
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
        form: StreamFormat = EVENTS,
    ) -> None:
        super().__init__(content_type=form.content_type)
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # otherwise nginx would buffer the stream
        self._attach = attach
        self._abandon = abandon
        self._close = close
        self._closing = closing
        self._outlet: Outlet | None = None
        self._options: dict[str, Any] = {
            "on_overflow": abandon,
            "keep_alive": form.keep_alive,
            "keep_alive_s": keep_alive_s,
            "send_timeout_s": send_timeout_s,
        }

    def hang_up(self) -> None:
        """Abandon the stream, because the client has disconnected. May be called in the hub."""
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
        """Write the whole response to the client's socket. Blocks this greenlet until the end."""
        outlet = self._outlet = SocketOutlet(sock, self._head(), **self._options)
        is_whole = False
        try:
            self._attach(outlet)
            outlet.run()
            is_whole = not outlet.is_cut
        finally:
            if outlet.is_cut:  # a write may have failed because the client disconnected
                self._abandon()
            self._close()
            outlet.close()
            if not is_whole or self._closing():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # gunicorn then reads EOF and closes

    def _head(self) -> bytes:
        """Return the status line and headers of the response, as gunicorn would send them."""
        headers = Headers(self.headers)
        headers.remove("Content-Length")
        headers["Transfer-Encoding"] = "chunked"
        headers["Date"] = http_date()
        headers["Connection"] = "close" if self._closing() else "keep-alive"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        return f"HTTP/1.1 {self.status}\r\n{lines}\r\n".encode("latin-1")

    def _generate(self) -> Iterator[bytes]:
        """Yield the body of the response, for any WSGI server."""
        outlet = self._outlet = IteratorOutlet(**self._options)
        try:
            self._attach(outlet)
            yield from outlet.run()
        finally:
            outlet.close()
