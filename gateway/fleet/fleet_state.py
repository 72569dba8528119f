"""What an engine client reports of several equal engines: one state for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.engine.client import ConnectedEngine, ZmqEngineClient
from gateway.fleet.adapters import load_in_all, unload_in_all
from gateway.fleet.replica_set import ReplicaSet
from protocol.engine.adapters import AdapterInfo
from protocol.engine.messages import Account, Limits
from protocol.engine.model_card import ModelCard
from protocol.engine.stats import EngineStats
from protocol.wire.errors import ServingError


class FleetState:
    """The state that `EngineClient` describes, of the replicas together."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    def start(self) -> None:
        raise NotImplementedError

    def on_exited(self) -> None:
        for replica in list(self._replicas):
            replica.client.on_exited()
        self._replicas.invalidate()

    @property
    def connections(self) -> list[ConnectedEngine]:
        return self._replicas.connections

    @property
    def is_ready(self) -> bool:
        return self.trouble() is None

    def trouble(self) -> ServingError | None:
        return self._replicas.trouble()

    @property
    def model(self) -> ModelCard | None:
        return self._replicas.model

    @property
    def limits(self) -> Limits | None:
        return self._replicas.limits

    @property
    def epoch(self) -> str | None:
        """The epoch of a usable replica."""
        shown = self._replicas.shown
        return None if shown is None else shown.epoch

    @property
    def silence_s(self) -> float | None:
        return self._replicas.silence_s

    @property
    def stats(self) -> EngineStats | None:
        """The statistics of the replica that has `epoch`."""
        shown = self._replicas.shown
        return None if shown is None else shown.stats

    def cached_refusal(self, account: Account | None) -> ServingError | None:
        return self._replicas.cached_refusal(account)

    def cache_refusal(self, account: Account | None, refusal: ServingError) -> None:
        """Do nothing: each replica's refusals are stored when the replica sends them."""

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """The adapters that any usable replica has. If several replicas have an adapter of the same
        name, it is that of the first replica."""
        replicas = self._replicas.usable
        infos = [info for each in replicas for info in reversed(each.client.adapters)]
        return [*{info.name: info for info in reversed(infos)}.values()]

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        self.start()
        return load_in_all(self._ready_engines, name, path)

    def unload_adapter(self, name: str) -> AdapterInfo:
        self.start()
        return unload_in_all(self._ready_engines, name)

    @property
    def _ready_engines(self) -> list[ZmqEngineClient]:
        """The engines, in all roles, that have a session."""
        return [each.client for each in self.connections if each.client.session.is_ready]
