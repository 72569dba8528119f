"""Errors of access control. `http/errors.py` maps each to its status."""

from __future__ import annotations

from protocol.errors import RequestError


class MalformedTarget(RequestError):
    """400: the request target or the Host header is malformed."""

    code = "malformed_request"


class NoSuchRoute(RequestError):
    """404"""

    code = "not_found"


class Unauthenticated(RequestError):
    """401: no API key, or an invalid one."""

    code = "invalid_api_key"


class Forbidden(RequestError):
    """403: the key, host or origin is not allowed to do this."""

    code = "forbidden"
