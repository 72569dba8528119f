"""Persistent state by the operator's options: the store, and the runs that write to it."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.responses.interrupted import interrupted_response
from gateway.api.resume.numbering import interrupted_stream
from gateway.store.runs import Runs
from gateway.store.store import Store
from protocol.config.gateway import NO_STORE, GatewayConfig

RESPONSE = "response"
"""Kind of a run that is a response generated in the background."""
STREAM = "stream"
"""Kind of a run that is a resumable stream."""
EPITAPHS = {RESPONSE: interrupted_response, STREAM: interrupted_stream}
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Persistence:
    """The store and its runs. `window_s`: how long a resumable stream waits for its client."""

    store: Store
    runs: Runs
    window_s: float

    @classmethod
    def of(cls, config: GatewayConfig) -> Persistence | None:
        """Return None if nothing is stored."""
        if config.response_store in ("", NO_STORE):
            return None
        store = Store(
            config.response_store,
            EPITAPHS,
            max_bytes=config.response_store_mib << 20,
            max_age_s=config.response_store_days * DAY_S,
        )
        return cls(store, Runs(store, config.resume_s), config.resume_s)

    @property
    def is_busy(self) -> bool:
        """Whether a generation without a client is running."""
        return bool(len(self.runs))

    def close(self) -> None:
        self.store.close()
