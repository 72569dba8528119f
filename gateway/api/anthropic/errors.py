"""Errors in Anthropic's shape: {"type": "error", "error": {"type", "message"}, "request_id"}.

The error may also have `param`, the field at fault, and `details.error_code`, our error code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.http.errors import HTTPFault

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> error type. Other statuses are invalid_request_error or api_error."""


def error_body(fault: HTTPFault, request_id: str) -> bytes:
    default = "invalid_request_error" if fault.status < 500 else "api_error"
    error: dict[str, Any] = {
        "type": TYPES.get(fault.status, default),
        "message": fault.message,
    }
    if fault.param is not None:
        error["param"] = fault.param
    if fault.code is not None:
        error["details"] = {"error_code": fault.code}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})
