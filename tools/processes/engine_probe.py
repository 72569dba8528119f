"""Finds out whether an engine without a gateway is ready, by connecting to it as a client."""

from __future__ import annotations

from protocol.config.engine import EngineConfig
from protocol.sdk.client import Client
from protocol.wire.errors import EngineNotReady
from protocol.wire.sockets import local_address
from tools.http.web import ServerReadiness

CONNECT_TIMEOUT_S = 1.0


class EngineProbe:
    """A `ReadinessProbe` of one engine on this machine. `name` is its name as a
    client of the engine."""

    def __init__(self, engine: EngineConfig, name: str) -> None:
        self._address = local_address(engine.address)
        self._key = engine.cluster_key
        self._name = name

    def readiness(self) -> ServerReadiness | None:
        try:
            with Client(
                self._address,
                name=self._name,
                wait_s=CONNECT_TIMEOUT_S,
                cluster_key=self._key,
            ) as engine:
                epochs = frozenset(filter(None, [engine.epoch]))
                return ServerReadiness(is_ready=True, model=engine.model.name, epochs=epochs)
        except EngineNotReady:
            return None
