"""Why somebody is not let in. Each has a status of its own; `errors.py` knows it."""

from __future__ import annotations

from protocol.errors import RequestError


class MalformedTarget(RequestError):
    """400: what is asked for is written as nobody writes it, or the Host is none."""

    code = "malformed_request"


class NoSuchRoute(RequestError):
    """404"""

    code = "not_found"


class Unauthenticated(RequestError):
    """401: no key, or none that is good here."""

    code = "invalid_api_key"


class Forbidden(RequestError):
    """403: who it is, is known; or where from; and it may not."""

    code = "forbidden"
