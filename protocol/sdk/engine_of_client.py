"""The properties of a client that describe its engine, such as the model and the limits."""

from __future__ import annotations

from protocol.engine.adapters import AdapterInfo
from protocol.engine.messages import Limits
from protocol.engine.model_card import ModelCard
from protocol.engine.session import Session
from protocol.engine.stats import EngineStats


class EngineOfClient:
    """Base of all clients. The properties can be read once the client is connected."""

    _session: Session

    @property
    def model(self) -> ModelCard:
        assert self._session.model is not None
        return self._session.model

    @property
    def limits(self) -> Limits:
        assert self._session.limits is not None
        return self._session.limits

    @property
    def epoch(self) -> str:
        """Identifies the engine's process: a restarted engine has another epoch. "" if the engine
        is lost."""
        return self._session.epoch or ""

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The LoRA adapters that requests can use now."""
        return self._session.adapters

    @property
    def stats(self) -> EngineStats:
        """The engine's statistics in its last heartbeat, at most about a second old."""
        return self._session.stats
