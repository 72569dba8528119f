"""Computes the time limits of a request from its fields, its headers and the operator's defaults.

OpenAI's and Anthropic's SDKs disconnect after a number of seconds without a byte, and they send
that number in a header. If the response is sent as a whole, the answer must be complete within that
time. For a stream the number does not matter, because streams send keep-alives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.config.gateway import GatewayConfig
from protocol.messages import MAX_TIMEOUT_S

CLIENT_HEADERS = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")
"""Headers with the client's own timeout. The first one with a valid number of seconds is used."""


class TimeoutHeaders(Protocol):
    """The headers of a request. Their names are case-insensitive."""

    def get(self, name: str, default: str, /) -> str: ...


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """The time limits of one answer."""

    #: Seconds until the answer must have ended; 0: no limit.
    timeout_s: float = 0.0
    #: Seconds until the answer must have started; 0: no limit.
    queue_timeout_s: float = 0.0

    @classmethod
    def from_request(
        cls,
        timeout_s: float | None,
        queue_timeout_s: float | None,
        config: GatewayConfig,
        headers: TimeoutHeaders | None,
    ) -> RequestTimeouts:
        """Return the limits of a request.

        timeout_s, queue_timeout_s  the request's fields; None: the operator's defaults apply
        headers                     the request's headers; None: the client's timeout does not apply
        """
        own_s = config.timeout_s if timeout_s is None else timeout_s
        client_s = 0.0 if headers is None else client_timeout_s(headers)
        return cls(
            timeout_s=min(filter(None, (own_s, client_s)), default=0.0),
            queue_timeout_s=(
                config.queue_timeout_s if queue_timeout_s is None else queue_timeout_s
            ),
        )


def client_timeout_s(headers: TimeoutHeaders) -> float:
    """Return the client's own timeout in seconds; 0 if the headers have no valid one."""
    for name in CLIENT_HEADERS:
        try:
            seconds = float(headers.get(name, ""))
        except ValueError:  # absent, or "NOT_GIVEN"
            continue
        if 0 < seconds <= MAX_TIMEOUT_S:
            return seconds
    return 0.0
