"""Who asks: the key that a request brings, whichever API's clients write it.

It is not checked here. What a caller has stored is kept under its key.
"""

from __future__ import annotations

from collections.abc import Mapping

_BEARER = "bearer "


def caller_key(headers: Mapping[str, str]) -> str | None:
    """`Authorization: Bearer KEY`, or else Anthropic's `x-api-key: KEY`. None: the request has
    none. `headers` takes names in any case, as those of a request do."""
    scheme = headers.get("Authorization", "")
    if scheme[: len(_BEARER)].lower() == _BEARER and (key := scheme[len(_BEARER) :].strip()):
        return key
    return headers.get("X-Api-Key", "").strip() or None
