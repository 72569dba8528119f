"""Server-sent events: the frame, and the response that streams frames.

If the client's socket is accessible (gunicorn, HTTP/1.1), the response takes it over: frames are
written directly from the engine client's dispatcher, and gunicorn gets ALREADY_HANDLED. With other
servers a generator yields the same bytes. Nothing is sent before the view has returned the
response, so every refusal can still have its own status.
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
LAST_EVENT_HEADER = "Last-Event-ID"
"""Sent by a client that resumes a stream."""


def frame(data: bytes) -> bytes:
    """Return an SSE frame. `data` is JSON without line breaks, as msgspec writes it."""
    return b"data: " + data + b"\n\n"


class EventStream(flask.Response):
    """A response that streams events.

    attach           called with the outlet when the stream starts; frames are written from then on
    abandon          called when the client disconnects or stops reading; also after the end
    close            called when the stream is over, however it ended
    closing          returns whether to close the connection after the stream
    keep_alive_s     after this much silence a comment is sent, or the outlet's own keep-alive
    send_timeout_s   a client that reads nothing for this long is disconnected
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
        """Abandon the stream: the client disconnected. May be called from the hub."""
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
            if outlet.is_cut:  # the disconnect may have been noticed while writing
                self._abandon()
            self._close()
            if not is_whole or self._closing():
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # gunicorn then reads EOF and closes

    def _head(self) -> bytes:
        """Return the response's head as gunicorn would send it."""
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
