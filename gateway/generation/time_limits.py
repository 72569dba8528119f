"""The time limits of a request: its own fields, its client's timeout, the operator's defaults.

The request's fields replace the operator's defaults. OpenAI's and Anthropic's SDKs disconnect after
a number of seconds without a byte, and they send that number in a header. If the response is sent
as a whole, the answer must be complete within that time. For a stream the number does not matter,
because streams send keep-alives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.auth.caller import CallerHeaders
from gateway.engine.base import remaining_s
from protocol.config.gateway import GatewayConfig
from protocol.engine.messages import MAX_TIMEOUT_S
from protocol.wire.errors import EngineNotReady, QueueTimeout, ServingError, TimedOut

CLIENT_HEADERS = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")
"""Headers with the client's own timeout. The first one with a valid number of seconds is used."""


class TimeoutFields(Protocol):
    """The time limits that a request sets, in seconds; None: the operator's limits apply."""

    @property
    def timeout_s(self) -> float | None: ...
    @property
    def queue_timeout_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """The time limits of one request, in seconds; 0: no limit."""

    #: Seconds until the answer must have ended.
    timeout_s: float = 0.0
    #: Seconds until the answer must have started.
    queue_timeout_s: float = 0.0
    #: Seconds until the model must be loaded. Only the operator sets this limit.
    load_timeout_s: float = 0.0

    @classmethod
    def from_request(
        cls, own: TimeoutFields | None, config: GatewayConfig, headers: CallerHeaders | None = None
    ) -> TimeLimits:
        """Return the limits of a request.

        own      the limits that the request sets; None: it cannot set any
        headers  the request's headers; None: the client's timeout does not apply
        """
        timeout_s, queue_timeout_s = config.timeout_s, config.queue_timeout_s
        if own is not None:
            timeout_s = timeout_s if own.timeout_s is None else own.timeout_s
            queue_timeout_s = (
                queue_timeout_s if own.queue_timeout_s is None else own.queue_timeout_s
            )
        client_s = 0.0 if headers is None else client_timeout_s(headers)
        timeout_s = min(filter(None, (timeout_s, client_s)), default=0.0)
        return cls(timeout_s, queue_timeout_s, config.load_timeout_s)

    def minus(self, waited_s: float) -> TimeLimits:
        """Return the limits of the answer that remain after a request has waited for its model."""
        return TimeLimits(
            remaining_s(self.timeout_s, waited_s), remaining_s(self.queue_timeout_s, waited_s)
        )

    def load_deadline(self, name: str, now: float) -> tuple[float, ServingError]:
        """Return the time until which a request may wait until the model `name` is loaded, and the
        error after that."""
        waiting = f"the model {name} was not loaded within"
        load_s, queue_s, total_s = self.load_timeout_s, self.queue_timeout_s, self.timeout_s
        errors: list[tuple[float, ServingError]] = [
            (
                load_s,
                EngineNotReady(f"{waiting} {load_s:g} s (--load-timeout-s)", retry_after_s=10),
            ),
            (
                queue_s,
                QueueTimeout(f"{waiting} the queue_timeout_s of {queue_s:g} s", retry_after_s=10),
            ),
            (total_s, TimedOut(f"{waiting} the timeout_s of {total_s:g} s")),
        ]
        seconds, error = min((e for e in errors if e[0]), key=lambda each: each[0])
        return now + seconds, error


def client_timeout_s(headers: CallerHeaders) -> float:
    """Return the client's own timeout in seconds; 0 if the headers have no valid one."""
    for name in CLIENT_HEADERS:
        try:
            seconds = float(headers.get(name, ""))
        except ValueError:  # absent, or "NOT_GIVEN"
            continue
        if 0 < seconds <= MAX_TIMEOUT_S:
            return seconds
    return 0.0
