"""How long a request may take: as it says itself, as its client's own timeout says, or as the
operator does. Pure.

Clients made by OpenAI's and Anthropic's generator tell, in a header, after how many seconds without
a byte they hang up. For an answer that is told as a whole that is all the time there is; a stream
is never silent for so long, so there it says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.config.gateway import GatewayConfig
from protocol.messages import MAX_TIMEOUT_S

CLIENT_HEADERS = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")
"""The first that says a number of seconds counts."""


class TimeoutHeaders(Protocol):
    """Of a request: names are taken in any case."""

    def get(self, name: str, default: str, /) -> str: ...


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """Seconds until an answer must have ended, and been begun; 0: no limit."""

    timeout_s: float = 0.0
    queue_timeout_s: float = 0.0

    @classmethod
    def of(
        cls,
        timeout_s: float | None,
        queue_timeout_s: float | None,
        config: GatewayConfig,
        headers: TimeoutHeaders | None,
    ) -> RequestTimeouts:
        """`headers`: of a client that waits for a whole answer."""
        own_s = config.timeout_s if timeout_s is None else timeout_s
        client_s = 0.0 if headers is None else client_timeout_s(headers)
        return cls(
            timeout_s=min(filter(None, (own_s, client_s)), default=0.0),
            queue_timeout_s=(
                config.queue_timeout_s if queue_timeout_s is None else queue_timeout_s
            ),
        )


UNLIMITED = RequestTimeouts()


def client_timeout_s(headers: TimeoutHeaders) -> float:
    """0: it does not say, or nothing that is a time."""
    for name in CLIENT_HEADERS:
        try:
            seconds = float(headers.get(name, ""))
        except ValueError:  # absent, or "NOT_GIVEN"
            continue
        if 0 < seconds <= MAX_TIMEOUT_S:
            return seconds
    return 0.0
