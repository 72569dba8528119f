"""Errors as HTTP knows them: a status, and what may be said. Each API writes them in its own JSON.

What is the caller's fault is shown as it is. What is ours is shown as a kind and an id; the log has
the rest under that id. Never a traceback, a path or an address.
"""

from __future__ import annotations

import logging
import math
import uuid
from dataclasses import dataclass

from gateway.auth.refusals import Forbidden, MalformedTarget, NoSuchRoute, Unauthenticated
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
"""What is not here is a failure of ours: 500."""
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
    """An error, ready to be told. `retry_after_s` is set with 429 and 503."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": CHALLENGE}
        if self.code == TimedOut.code:  # as much time would go again: SDKs obey this
            return {"X-Should-Retry": "false"}
        return {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}


def fault_of(error: ServingError) -> HTTPFault:
    """For a status line, or for the last event of a stream. Logs what is not the caller's fault."""
    status = _STATUS.get(type(error), 500)
    if status == 500:
        return internal_fault(error)
    if not isinstance(error, RequestError):
        log.info("answered %d: %s", status, error.message)
    retry_s = None
    if status in (429, 503):
        retry_s = max(DEFAULT_RETRY_S, math.ceil(error.retry_after_s or 0))
    code = None if type(error) is InvalidRequest else error.code
    return HTTPFault(status, error.message, error.param, code, retry_s)


def internal_fault(error: BaseException) -> HTTPFault:
    """A failure of ours: the log has it under an id, the client gets the id."""
    error_id = uuid.uuid4().hex[:12]
    if isinstance(error, ServingError):
        log.error("error %s: %s", error_id, error)
    else:
        log.error("error %s", error_id, exc_info=error)
    message = f"the server failed to answer this request (error id {error_id})"
    code = error.code if isinstance(error, ServingError) else "internal_error"
    return HTTPFault(500, message, code=code)


def plain_fault(status: int, message: str) -> HTTPFault:
    """An error of HTTP itself: no such path, wrong method, body too large, wrong content type."""
    return HTTPFault(status, message, code=_PLAIN_CODES.get(status))
