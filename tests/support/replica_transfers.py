"""The worker's real K/V transfers of a replica: leases and movers between replicas, and tiers."""

from __future__ import annotations

import select
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from engine_core.kv.peers import PeerCluster
from engine_core.kv.transfers import KVCommand
from protocol.config.worker import WorkerConfig
from protocol.engine.model_card import ModelCard
from protocol.worker.kv import KVReport
from worker.kv.cache import PagedCache
from worker.kv.checkpoint_memory import CheckpointMemory
from worker.kv.layout import KVLayout
from worker.kv.transfer.service import KVTransferService

SECRET = b"k" * 32
"""Seals the handles of all replicas, which therefore belong to one cluster."""
WAIT_S = 60.0


@dataclass(frozen=True)
class ReplicaTransfers:
    """The transfers of one replica. Call `close` when the replica is no longer needed.

    cluster   the replica's membership: every replica with transfers can read from every other
    """

    service: KVTransferService
    cluster: PeerCluster
    context: zmq.Context[zmq.Socket[bytes]] = field(repr=False)

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        card: ModelCard,
        cache: PagedCache,
        states: CheckpointMemory | None,
    ) -> ReplicaTransfers:
        """Start the transfers of a cache, and of the checkpoints of states if there are any."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        layout = KVLayout.from_cache(card, cache, 0 if states is None else states.state_bytes)
        service = KVTransferService(config, context, cache, layout, states, numerics=card.numerics)
        return cls(service, PeerCluster(SECRET, f"{id(cache):x}", service.endpoint), context)

    @property
    def tiers(self) -> Sequence[str]:
        return self.service.tiers

    def apply(self, command: KVCommand) -> None:
        self.service.apply(command)

    def report(self) -> KVReport | None:
        """Return the transfers' report; None if there is nothing to report."""
        return self.service.report()

    def wait(self) -> None:
        """Wait until there may be a report."""
        assert select.select([self.service.fd], [], [], WAIT_S)[0], "the transfers are silent"

    def close(self) -> None:
        self.service.__exit__()
        self.context.term()
