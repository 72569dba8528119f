"""K/V in one worker: what the engine says of it goes where it belongs, and what has become of it
comes back."""

from __future__ import annotations

from typing import Self

import zmq

from protocol import sockets
from protocol.cluster_key import read_cluster_key
from protocol.config.worker import WorkerConfig
from protocol.kv import (
    KVCancel,
    KVEndpoint,
    KVExport,
    KVFetch,
    KVReport,
    KVStore,
    KVUsed,
    KVWithdraw,
    TierSource,
)
from protocol.kv_peers import Offer, ZmqOffer
from protocol.steps import NULL_BLOCK
from worker.kv.blocks import blocks_of
from worker.kv.cache import KVCache
from worker.kv.layout import KVLayout
from worker.kv.movers.choice import Ways
from worker.kv.movers.nixl import Agent
from worker.kv.movers.zmq import CHUNK_BYTES
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.store import TierStore
from worker.kv.transfer.exports import Exports
from worker.kv.transfer.fetcher import Fetcher
from worker.kv.transfer.server import SEND_QUEUE, KVServer
from worker.kv.transfer.transfer import Here
from worker.slots.staging import integers

ToExchange = KVExport | KVWithdraw | KVFetch | KVCancel | KVStore | KVUsed


class KVTransferService:
    """To be closed by its `with`.

    endpoint   what WorkerReady says: without an address where this worker exports nothing, and
               only fetches

    Raises NoNixl where that is wanted and absent, zmq.ZMQError where the address cannot be had.
    """

    def __init__(
        self,
        config: WorkerConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        cache: KVCache,
        layout: KVLayout,
    ) -> None:
        key = read_cluster_key(config.cluster_key)
        wants_nixl = config.kv_mover == "nixl"
        here = KVEndpoint(
            address=config.kv_address if config.kv_export else "",
            layout=layout.digest,
            told=layout.told,
            mover=config.kv_mover,
        )
        blocks = blocks_of(cache)
        ways = Ways(config.kv_mover, blocks, Agent(cache.rows) if wants_nixl else None)
        self.endpoint = here
        self._num_blocks = cache.num_blocks
        self._exports = Exports()
        self._server: KVServer | None = None
        self._news = ReportQueue()
        if config.kv_export:
            helper = Agent(cache.rows) if wants_nixl else None
            socket = sockets.bind_router(context, config.kv_address, key, send_queue=SEND_QUEUE)
            offers = _offers(config, cache, helper)
            self._server = KVServer(
                socket, here, blocks, offers, self._exports, self._news, helper=helper
            )
        self._tiers = TierStore.of(config, layout.digest, cache.rows, blocks, self._news)
        self._fetcher = Fetcher(Here(context, key, here, blocks, ways), self._news)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._fetcher.close()
        if self._server is not None:
            self._server.close()
        if self._tiers is not None:
            self._tiers.close()
        self._news.close()

    @property
    def num_dropped(self) -> int:
        """Messages of other workers that made no sense, and answers that nobody took."""
        return 0 if self._server is None else self._server.num_dropped

    @property
    def tiers(self) -> list[str]:
        """What WorkerReady says of them."""
        return [] if self._tiers is None else list(self._tiers.names)

    @property
    def fd(self) -> int:
        """Can be read when `report` may have something to say."""
        return self._news.fd

    def take(self, message: ToExchange) -> None:
        """Never waits. Raises ValueError on a lease that cannot be."""
        match message:
            case KVExport(lease=lease, blocks=blocks, readers=readers):
                ids = integers(blocks.data)
                if not len(ids) or ids.min() <= NULL_BLOCK or ids.max() >= self._num_blocks:
                    raise ValueError(f"lease {lease.hex()} has blocks that are none")
                self._exports.add(lease, ids, readers)
            case KVWithdraw(lease=lease):
                self._exports.withdraw(lease)
            case KVFetch(source=TierSource() as source) if self._tiers is not None:
                self._tiers.fetch(message, source)
            case KVFetch():
                self._fetcher.fetch(message)
            case KVCancel():
                self._fetcher.cancel(message)
                if self._tiers is not None:
                    self._tiers.cancel(message.job)
            case KVStore():
                self._expect_tiers().keep(message)
            case KVUsed():
                self._expect_tiers().use(message)

    def _expect_tiers(self) -> TierStore:
        if self._tiers is None:
            raise ValueError("this worker has no tiers, and has said so")
        return self._tiers

    def report(self) -> KVReport | None:
        """What is new. Raises what a thread has died of."""
        return self._news.take()


def _offers(config: WorkerConfig, cache: KVCache, helper: Agent | None) -> list[Offer]:
    """The ways that our configuration allows, to whoever asks."""
    offers: list[Offer] = []
    if cache.shared is not None:
        offers.append(cache.shared.offer(cache.num_blocks))
    if config.kv_mover in ("auto", "zmq"):
        offers.append(ZmqOffer(chunk_bytes=CHUNK_BYTES))
    if helper is not None:
        offers.append(helper.offer())
    return offers
