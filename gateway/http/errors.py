"""Errors -> HTTP status and the public message. Each API encodes them in its own JSON.

An error that the client caused is shown as it is. Of an internal error the client gets a code and
an id; the log has the details under that id. A response never has a traceback, path or address.
"""

from __future__ import annotations

import logging
import math
import uuid
from dataclasses import dataclass

from gateway.auth.gate import Forbidden, MalformedTarget, NoSuchRoute, Unauthenticated
from protocol.errors import (
    ContextTooLong,
    Draining,
    EngineLost,
    EngineNotReady,
    InvalidRequest,
    LimitReached,
    NoEngine,
    Overloaded,
    QueueTimeout,
    RequestError,
    ServingError,
    TimedOut,
    UnknownModel,
)

log = logging.getLogger(__name__)

_STATUS: dict[type[ServingError], int] = {
    MalformedTarget: 400,
    NoSuchRoute: 404,
    Unauthenticated: 401,
    Forbidden: 403,
    InvalidRequest: 400,
    ContextTooLong: 400,
    UnknownModel: 404,
    Overloaded: 429,
    QueueTimeout: 429,
    TimedOut: 504,
    LimitReached: 429,
    EngineNotReady: 503,
    NoEngine: 501,
    EngineLost: 503,
    Draining: 503,
}
"""Other errors are internal: 500."""
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
DEFAULT_RETRY_S = 1
CHALLENGE = 'Bearer realm="tidegate"'


@dataclass(frozen=True, slots=True)
class HTTPFault:
    """An error as the client sees it. `retry_after_s` is set for 429 and 503."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": CHALLENGE}
        if self.code == TimedOut.code:  # SDKs obey this; a retry would take as long again
            return {"X-Should-Retry": "false"}
        return {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}


def fault_of(error: ServingError) -> HTTPFault:
    """Return the response to `error`, and log it unless the client caused it."""
    status = _STATUS.get(type(error), 500)
    if status == 500:
        return internal_fault(error)
    if not isinstance(error, RequestError):
        log.info("status %d: %s", status, error.message)
    retry_s = None
    if status in (429, 503):
        retry_s = max(DEFAULT_RETRY_S, math.ceil(error.retry_after_s or 0))
    code = None if type(error) is InvalidRequest else error.code
    return HTTPFault(status, error.message, error.param, code, retry_s)


def internal_fault(error: BaseException) -> HTTPFault:
    """Log an internal error under a new id, and return a response with that id."""
    error_id = uuid.uuid4().hex[:12]
    if isinstance(error, ServingError):
        log.error("error %s: %s", error_id, error)
    else:
        log.error("error %s", error_id, exc_info=error)
    message = f"internal server error (error id {error_id}); the server's log has the details"
    code = error.code if isinstance(error, ServingError) else "internal_error"
    return HTTPFault(500, message, code=code)


def plain_fault(status: int, message: str) -> HTTPFault:
    """Return an error of HTTP itself, such as an unknown path or a body that is too large."""
    return HTTPFault(status, message, code=_PLAIN_CODES.get(status))
