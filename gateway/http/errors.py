"""The HTTP status and the public message of each error. Each API encodes them in its own JSON.

The response to an internal error has only a code and an error id; the log has the details under
that id. The response to any other error has the error's message. A response never contains a
traceback, a file path or an address.
"""

from __future__ import annotations

import logging
import math
import re
import sqlite3
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from gateway.auth.gate import (
    Forbidden,
    MalformedTarget,
    NoSuchRoute,
    RoutingRule,
    Unauthenticated,
)
from gateway.auth.request_head import MAX_SHOWN_CHARS, printable
from protocol.wire.errors import (
    AttachmentMissing,
    ContextExcess,
    ContextTooLong,
    DiskFull,
    DownloadFailed,
    Draining,
    EngineLost,
    EngineNotReady,
    InvalidImage,
    InvalidRequest,
    LimitReached,
    NoEngine,
    Overloaded,
    QueueTimeout,
    RequestError,
    ServingError,
    StaleAdapter,
    TimedOut,
    UnknownModel,
    UnknownRequest,
)
from protocol.wire.field_words import shown

log = logging.getLogger(__name__)


class StoreUnusable(ServingError, sqlite3.OperationalError):
    """Raised if the file of a store cannot be opened, read or written. The operation can be tried
    again. The message does not name the file, because clients get it."""

    code = "store_unusable"


class ThreadsUnsupported(InvalidRequest):
    """Raised if a request of the Messages API continues or creates a conversation that the server
    would have to store. Anthropic's SDKs then send the whole conversation."""

    code = "thread_unsupported_request"


class NoSuchId(RequestError):
    """Raised if a path has an id that the server does not know."""

    code = "not_found"

    @classmethod
    def of(cls, name: str, known: str, value: str) -> NoSuchId:
        """Return the error of a part of the path: "file_id: must be the id of a stored file; got
        ...".

        name   the part, as the reference names it
        known  what it may be, in words
        """
        return cls(f"{name}: must be {known}; got {shown(value)}", param=name)


_STATUS: dict[type[ServingError], int] = {
    MalformedTarget: 400,
    NoSuchRoute: 404,
    Unauthenticated: 401,
    Forbidden: 403,
    InvalidRequest: 400,
    InvalidImage: 400,
    ThreadsUnsupported: 400,
    ContextTooLong: 400,
    NoSuchId: 404,
    UnknownModel: 404,
    UnknownRequest: 404,
    Overloaded: 429,
    QueueTimeout: 429,
    TimedOut: 504,
    LimitReached: 429,
    EngineNotReady: 503,
    NoEngine: 501,
    EngineLost: 503,
    StaleAdapter: 503,
    AttachmentMissing: 503,
    DownloadFailed: 502,
    DiskFull: 507,
    Draining: 503,
    StoreUnusable: 503,
}
"""Status of each error class. All other errors are internal and get 500."""
_PLAIN_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "body_too_large",
    414: "uri_too_long",
    415: "unsupported_media_type",
    417: "expectation_failed",
    431: "headers_too_large",
}
"""Status of an error of HTTP itself -> its code in the response."""
DEFAULT_RETRY_S = 1
"""Minimum value of the Retry-After header, in seconds."""
CHALLENGE = 'Bearer realm="tidegate"'
_VARIABLE = re.compile(r"<(?:\w+:)?(\w+)>")
_NOT_LISTED = {"HEAD", "OPTIONS"}
MAX_SIMILAR = 3
"""Maximum number of similar paths that a 404 lists."""
MIN_SIMILARITY = 0.6
"""Minimum similarity of a listed path to the requested one, as `difflib` measures it; 1: equal."""
_ALL_ROUTES = "GET /openapi.json lists all routes"


@dataclass(frozen=True, slots=True)
class HTTPFault:
    """An error response, before an API encodes it."""

    status: int
    message: str
    #: Path of the invalid field in the request.
    param: str | None = None
    code: str | None = None
    #: Set for the statuses 429 and 503.
    retry_after_s: int | None = None
    #: The numbers of a text that is longer than the context, for APIs with words of their own.
    excess: ContextExcess | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The response headers that belong to this error."""
        if self.status == 401:
            return {"WWW-Authenticate": CHALLENGE}
        if self.code == TimedOut.code:  # SDKs obey this header; a retry would take as long again
            return {"X-Should-Retry": "false"}
        return {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}


def fault_of(error: ServingError) -> HTTPFault:
    """Return the response to `error`, and log the error unless the client caused it."""
    status = _STATUS.get(type(error), 500)
    if status == 500:
        return internal_fault(error)
    if not isinstance(error, RequestError):
        log.info("status %d: %s", status, error.message)
    retry_s = None
    if status in (429, 503):
        retry_s = max(DEFAULT_RETRY_S, math.ceil(error.retry_after_s or 0))
    code = None if type(error) in (InvalidRequest, InvalidImage) else error.code
    return HTTPFault(status, error.message, error.param, code, retry_s, error.excess)


def internal_fault(error: BaseException) -> HTTPFault:
    """Log an internal error under a new error id, and return a response with that id."""
    error_id = uuid.uuid4().hex[:12]
    if isinstance(error, ServingError):
        log.error("error %s: %s", error_id, error)
    else:
        log.error("error %s", error_id, exc_info=error)
    message = f"internal server error (error id {error_id}); the server's log has the details"
    code = error.code if isinstance(error, ServingError) else "internal_error"
    return HTTPFault(500, message, code=code)


def plain_fault(status: int, message: str) -> HTTPFault:
    """Return the response to an error of the HTTP layer, such as a body that is too large."""
    return HTTPFault(status, message, code=_PLAIN_CODES.get(status))


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of `error` and of the errors before it. Their frames hold all variables
    of the functions that the errors passed through."""
    before: BaseException | None = error
    while before is not None:
        before.__traceback__ = None
        before = before.__context__


class RouteSuggestions:
    """Writes the messages of 404 and 405 errors.

    A 404 lists routes that resemble the requested one, as `METHOD /path/{variable}`.

    rules  the application's routes
    """

    def __init__(self, rules: Iterable[RoutingRule]) -> None:
        methods: dict[str, set[str]] = {}
        for rule in rules:
            path = _VARIABLE.sub(r"{\1}", rule.rule)
            methods.setdefault(path, set()).update((rule.methods or set()) - _NOT_LISTED)
        self._methods: Mapping[str, list[str]] = {
            path: sorted(found) for path, found in methods.items()
        }

    def not_found(self, method: str, path: str) -> str:
        requested = path[:MAX_SHOWN_CHARS].rstrip("/").lower()
        similar = get_close_matches(requested, self._methods, MAX_SIMILAR, MIN_SIMILARITY)
        message = f"there is no route {method} {printable(path)}"
        if not similar:
            return f"{message}; {_ALL_ROUTES}"
        routes = (f"{method} {path}" for path in similar for method in self._methods[path])
        return f"{message}; similar routes: {', '.join(routes)}; {_ALL_ROUTES}"

    def not_allowed(self, method: str, path: str, allowed: Iterable[str]) -> str:
        methods = ", ".join(sorted(set(allowed) - _NOT_LISTED))
        return f"{method} is not allowed on {printable(path)}; allowed: {methods}"
