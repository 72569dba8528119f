"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import msgspec

from gateway.http.errors import HTTPFault

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


def error_body(fault: HTTPFault) -> bytes:
    default = "invalid_request_error" if fault.status < 500 else "server_error"
    error = {
        "message": fault.message,
        "type": _TYPES.get(fault.status, default),
        "param": fault.param,
        "code": fault.code,
    }
    return msgspec.json.encode({"error": error})
