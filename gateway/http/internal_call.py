"""Requests that this process makes to its own application, without a socket.

An internal request takes the same path as one over HTTP: the same route, checks, hooks and error
handlers. So its answer is the one that a client would get. Only the authentication differs: the
caller is passed in and not found by an API key.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.auth.caller import Caller
from gateway.http.body import WHOLE

ORIGIN = "tidegate.origin"
"""Key of the `InternalOrigin` in the WSGI environment. Clients cannot set it, because the
environment has their headers under keys that start with HTTP_."""
WSGIApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class InternalOrigin:
    """The caller for whom a request inside the gateway is made, such as the owner of a batch."""

    caller: Caller
    #: Whether requests of clients are served before this one.
    is_background: bool


@dataclass(frozen=True, slots=True)
class InternalAnswer:
    """The response to an internal request."""

    status: int
    #: Header names in lower case.
    headers: Mapping[str, str]
    body: bytes


def internal_origin(environ: Mapping[str, Any]) -> InternalOrigin | None:
    """Return the origin of an internal request; None for a request over HTTP."""
    return environ.get(ORIGIN)


def call_internally(application: WSGIApplication, environ: dict[str, Any]) -> InternalAnswer:
    """Send the request of `internal_environ` to the application, and return the whole response."""
    started: list[tuple[str, list[tuple[str, str]]]] = []

    def start_response(
        status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], None]:
        started.append((status, headers))
        return lambda data: None

    pieces = application(environ, start_response)
    try:
        data = b"".join(pieces)
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    status, headers = started[-1]
    named = {name.lower(): value for name, value in headers}
    return InternalAnswer(int(status.split()[0]), named, data)


def internal_environ(path: str, body: bytes, origin: InternalOrigin) -> dict[str, Any]:
    """Return the WSGI environment of a POST request with a JSON body."""
    return {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "RAW_URI": path,
        "QUERY_STRING": "",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "HTTP_HOST": "localhost",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        WHOLE: body,
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": False,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        ORIGIN: origin,
    }
