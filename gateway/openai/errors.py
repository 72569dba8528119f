"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

What is the caller's fault is shown as it is. What is ours is shown as a kind and an id; the log has
the rest under that id. Never a traceback, a path or an address.
"""

from __future__ import annotations

import logging
import math
import uuid
from dataclasses import dataclass

import msgspec

from protocol.errors import (
    ContextTooLong,
    Draining,
    EngineLost,
    EngineNotReady,
    InvalidRequest,
    Overloaded,
    RequestError,
    ServingError,
    UnknownModel,
)

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
SERVER = "server_error"

_KINDS: dict[type[ServingError], tuple[int, str, str | None]] = {
    InvalidRequest: (400, INVALID, None),
    ContextTooLong: (400, INVALID, ContextTooLong.code),
    UnknownModel: (404, INVALID, UnknownModel.code),
    Overloaded: (429, "rate_limit_error", Overloaded.code),
    EngineNotReady: (503, UNAVAILABLE, EngineNotReady.code),
    EngineLost: (503, UNAVAILABLE, EngineLost.code),
    Draining: (503, UNAVAILABLE, Draining.code),
}
"""error -> (status, type, code)"""
DEFAULT_RETRY_S = 1


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as HTTP says it. `retry_after_s` is set with 429 and 503."""

    status: int
    body: bytes
    retry_after_s: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def http_error(error: ServingError) -> HttpError:
    """For a status line, or for the last event of a stream. Logs what is not the caller's fault."""
    status, kind, code = _KINDS.get(type(error), (500, SERVER, error.code))
    if status == 500:
        return internal_error(error)
    body = error_body(error.message, kind, param=error.param, code=code)
    if not isinstance(error, RequestError):
        log.info("answered %d: %s", status, error.message)
    retry_s = None
    if status in (429, 503):
        retry_s = max(DEFAULT_RETRY_S, math.ceil(error.retry_after_s or 0))
    return HttpError(status, body, retry_s)


def internal_error(error: BaseException) -> HttpError:
    """A failure of ours: the log has it under an id, the client gets the id."""
    error_id = uuid.uuid4().hex[:12]
    trace = None if isinstance(error, ServingError) else error
    log.error("error %s: %s", error_id, error, exc_info=trace)
    message = f"the server failed to answer this request (error id {error_id})"
    code = error.code if isinstance(error, ServingError) else "internal_error"
    return HttpError(500, error_body(message, SERVER, code=code))


def plain_error(status: int, message: str) -> HttpError:
    """An error of HTTP itself: no such path, wrong method, body too large, wrong content type."""
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    codes[415] = "unsupported_media_type"
    kind = INVALID if status < 500 else SERVER
    return HttpError(status, error_body(message, kind, code=codes.get(status)))
