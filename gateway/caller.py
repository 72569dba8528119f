"""Who asks: the key that a request brings, whichever API's clients write it.

It is not checked here. What a caller has stored is kept under its key.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

_BEARER = "bearer "


class Headers(Protocol):
    """Of a request: names are taken in any case."""

    def get(self, name: str, default: str, /) -> str: ...


def caller_key(headers: Headers) -> str | None:
    """`Authorization: Bearer KEY`, or else Anthropic's `x-api-key: KEY`. None: the request has
    none."""
    scheme = headers.get("Authorization", "")
    if scheme[: len(_BEARER)].lower() == _BEARER and (key := scheme[len(_BEARER) :].strip()):
        return key
    return headers.get("X-Api-Key", "").strip() or None


def owner_of(headers: Headers) -> str:
    """Whose a request is: a digest of its key, which itself is kept nowhere. Those who have no key
    are one owner."""
    key = caller_key(headers)
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
