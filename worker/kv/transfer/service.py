"""K/V transfers of one worker: applies the engine's messages, and collects the reports."""

from __future__ import annotations

from typing import Self

import zmq
from torch import Tensor

from protocol.config.worker import WorkerConfig
from protocol.wire import sockets
from protocol.wire.cluster_key import read_cluster_key
from protocol.worker.kv import (
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
from protocol.worker.kv_peers import Offer, ZmqOffer
from protocol.worker.steps import NULL_BLOCK
from worker.device.staging import integers
from worker.kv.blocks import CacheBlocks, cache_blocks, memory_blocks
from worker.kv.cache import PagedCache
from worker.kv.checkpoint_memory import CheckpointMemory
from worker.kv.layout import KVLayout
from worker.kv.movers.choice import MoverFactory
from worker.kv.movers.nixl import Agent
from worker.kv.movers.zmq import CHUNK_BYTES
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.store import StoredMemory, TierStore
from worker.kv.transfer.exports import Exports
from worker.kv.transfer.fetcher import Fetcher, TransferContext
from worker.kv.transfer.server import SEND_QUEUE, ExportedMemory, KVServer
from worker.kv.transfer.shared_memory import SharedMemory

KVMessage = KVExport | KVWithdraw | KVFetch | KVCancel | KVStore | KVUsed


class KVTransferService:
    """Owns the threads that move K/V. Use it as a context manager.

    states     the checkpoints of recurrent states; None: the model has none
    numerics   ModelCard.numerics; blocks that were stored on disk with another value are not used
    endpoint   describes this worker in WorkerReady; its address is "" if the worker exports nothing

    Raises NoNixl if NIXL is configured but not available, zmq.ZMQError if the address cannot be
    bound, and OSError or ValueError if a configured tier cannot be used.
    """

    def __init__(
        self,
        config: WorkerConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        cache: PagedCache,
        layout: KVLayout,
        states: CheckpointMemory | None = None,
        *,
        numerics: str = "",
    ) -> None:
        key = read_cluster_key(config.cluster_key)
        self.endpoint = KVEndpoint(
            address=config.kv_address if config.kv_export else "",
            layout=layout.digest,
            layout_text=layout.description,
            mover=config.kv_mover,
        )
        blocks = cache_blocks(cache)
        state_blocks = None if states is None else memory_blocks(states.rows)
        self._num_blocks = cache.num_blocks
        self._num_checkpoints = 0 if states is None else states.num_rows - 1
        self._exports = Exports()
        self._server: KVServer | None = None
        self._reports = ReportQueue()
        if config.kv_export:
            socket = sockets.bind_router(context, config.kv_address, key, send_queue=SEND_QUEUE)
            self._server = KVServer(
                socket,
                self.endpoint,
                _exported(config, cache.rows, blocks, cache.shared),
                None
                if states is None or state_blocks is None
                else _exported(config, states.rows, state_blocks, states.shared),
                self._exports,
                self._reports,
            )
        self._tiers = TierStore.from_config(
            config,
            StoredMemory(cache.rows, blocks, layout.stored_digest(numerics)),
            None
            if states is None or state_blocks is None
            else StoredMemory(states.rows, state_blocks, layout.state_digest(numerics)),
            self._reports,
        )
        shared = TransferContext(
            context,
            key,
            self.endpoint,
            _movers(config, cache.rows, blocks),
            None
            if states is None or state_blocks is None
            else _movers(config, states.rows, state_blocks),
        )
        self._fetcher = Fetcher(shared, self._reports)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._fetcher.close()
        if self._server is not None:
            self._server.close()
        if self._tiers is not None:
            self._tiers.close()
        self._reports.close()

    @property
    def num_dropped(self) -> int:
        """Return the number of dropped messages: invalid ones from other workers, and answers that
        could not be sent."""
        return 0 if self._server is None else self._server.num_dropped

    @property
    def tiers(self) -> list[str]:
        """Return the names of the tiers, for WorkerReady."""
        return [] if self._tiers is None else list(self._tiers.names)

    @property
    def fd(self) -> int:
        """Return a file descriptor that is readable if `report` may return something."""
        return self._reports.fd

    def apply(self, message: KVMessage) -> None:
        """Apply a message of the engine, without waiting.

        Raises ValueError if a KVExport names blocks that do not exist or a lease that exists
        already, if a KVExport or KVFetch has no checkpoint although the model has a recurrent
        state, or one that does not exist, or if a KVStore or KVUsed arrives and this worker has no
        tiers. A fetch from a tier is reported as lost if there are no tiers.
        """
        if isinstance(message, KVExport | KVFetch):
            self._check_checkpoint(message)
        match message:
            case KVExport(lease=lease, blocks=blocks, readers=readers):
                ids = integers(blocks.data)
                if not len(ids) or ids.min() <= NULL_BLOCK or ids.max() >= self._num_blocks:
                    raise ValueError(f"lease {lease.hex()} has blocks that do not exist")
                self._exports.add(lease, ids, readers, message.checkpoint)
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
                self._require_tiers().store(message)
            case KVUsed():
                self._require_tiers().touch(message)

    def _check_checkpoint(self, message: KVExport | KVFetch) -> None:
        number, total = message.checkpoint, self._num_checkpoints
        is_right = number is None if not total else number is not None and 0 < number <= total
        if not is_right:
            raise ValueError(
                f"{type(message).__name__} has the checkpoint {number}; there are {total}"
            )

    def _require_tiers(self) -> TierStore:
        if self._tiers is None:
            raise ValueError("this worker has no tiers")
        return self._tiers

    def report(self) -> KVReport | None:
        """Return everything that was added since the last report, or None. Raises the exception of
        a thread that failed."""
        return self._reports.drain()


def _exported(
    config: WorkerConfig, rows: Tensor, blocks: CacheBlocks, shared: SharedMemory | None
) -> ExportedMemory:
    """Return memory that other workers may read, with the movers that the configuration allows.
    `shared` is the memory of `rows`, if others can map it."""
    offers: list[Offer] = []
    if shared is not None:
        offers.append(shared.offer(blocks.num_blocks))
    if config.kv_mover in ("auto", "zmq"):
        offers.append(ZmqOffer(chunk_bytes=CHUNK_BYTES))
    helper = Agent(rows) if config.kv_mover == "nixl" else None
    if helper is not None:
        offers.append(helper.offer())
    return ExportedMemory(blocks, offers, helper)


def _movers(config: WorkerConfig, rows: Tensor, blocks: CacheBlocks) -> MoverFactory:
    """Return a factory of the movers that fill `blocks` of this worker, whose memory is `rows`."""
    agent = Agent(rows) if config.kv_mover == "nixl" else None
    return MoverFactory(config.kv_mover, blocks, agent)
