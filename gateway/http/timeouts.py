"""Time limits of a request: its own fields, its client's timeout, or the operator's default. Pure.

OpenAI's and Anthropic's generated SDKs send, in a header, after how many seconds without a byte
they disconnect. For a response that is sent as a whole this is the total time available. It does
not apply to streams, which send keep-alives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.config.gateway import GatewayConfig
from protocol.messages import MAX_TIMEOUT_S

CLIENT_HEADERS = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")
"""The first header with a valid number of seconds is used."""


class TimeoutHeaders(Protocol):
    """The headers of a request. Names are case-insensitive."""

    def get(self, name: str, default: str, /) -> str: ...


@dataclass(frozen=True, slots=True)
class RequestTimeouts:
    """Seconds until an answer must have finished, and must have started; 0: no limit."""

    timeout_s: float = 0.0
    queue_timeout_s: float = 0.0

    @classmethod
    def from_request(
        cls,
        timeout_s: float | None,
        queue_timeout_s: float | None,
        config: GatewayConfig,
        headers: TimeoutHeaders | None,
    ) -> RequestTimeouts:
        """Return the limits of a request. `headers` is None for a stream."""
        own_s = config.timeout_s if timeout_s is None else timeout_s
        client_s = 0.0 if headers is None else client_timeout_s(headers)
        return cls(
            timeout_s=min(filter(None, (own_s, client_s)), default=0.0),
            queue_timeout_s=(
                config.queue_timeout_s if queue_timeout_s is None else queue_timeout_s
            ),
        )


def client_timeout_s(headers: TimeoutHeaders) -> float:
    """Return the client's own timeout; 0 if it sends none, or an invalid one."""
    for name in CLIENT_HEADERS:
        try:
            seconds = float(headers.get(name, ""))
        except ValueError:  # absent, or "NOT_GIVEN"
            continue
        if 0 < seconds <= MAX_TIMEOUT_S:
            return seconds
    return 0.0
