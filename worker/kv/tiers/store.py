"""A worker's tiers as its loop sees them: what is said about them, and what they have to say.

`keep` and `use` store, `fetch` and `cancel` load; whatever becomes of that is news. The loop itself
waits for none of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from protocol.config.worker import WorkerConfig
from protocol.kv import KVFetch, KVStore, KVTierNews, KVUsed, TierSource
from protocol.preflight import GIB
from worker.kv.blocks import CacheBlocks
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.counts import KINDS, Counts, Kind, Tier
from worker.kv.tiers.disk import DiskTier
from worker.kv.tiers.host import HostTier
from worker.kv.tiers.memory import HostMemory
from worker.kv.tiers.reader import TierReader
from worker.kv.tiers.writer import TierWriter, most_unwritten
from worker.startup.memory import free_bytes


class TierStore:
    """rows         of the cache, see KVCache.rows
    host_bytes   of the host tier; 0: there is none, host memory is but the way to the disk
    disk         None: there is none

    Raises ValueError where `host_bytes` hold no block.
    """

    def __init__(
        self,
        rows: Tensor,
        blocks: CacheBlocks,
        disk: DiskTier | None,
        host_bytes: int,
        news: ReportQueue,
    ) -> None:
        self._is_host = host_bytes > 0
        self._disk = disk
        self._counts = Counts()
        self._block_bytes = blocks.num_rows * blocks.piece_bytes
        places = (
            host_bytes // self._block_bytes if host_bytes else most_unwritten(self._block_bytes)
        )
        self._host = HostTier(places)
        memory = HostMemory(rows, places + 1)
        self._keeper = TierWriter(self._host, memory, disk, self._counts, self.names, news)
        host = self._host if host_bytes else None
        self._loader = TierReader(blocks, host, memory, places, disk, self._counts, news)
        news.ask_of_tiers(self._take_news)

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        layout: bytes,
        rows: Tensor,
        blocks: CacheBlocks,
        news: ReportQueue,
    ) -> Self | None:
        """As `config` says; None where it says nothing. Raises OSError for a directory that cannot
        be, ValueError for too little or too much memory."""
        if not config.kv_host_gib and not config.kv_disk:
            return None
        host_bytes = int(config.kv_host_gib * GIB)
        if host_bytes > (free := free_bytes(torch.device("cpu"))):
            raise ValueError(
                f"kv_host_gib is {config.kv_host_gib:g}; {free / GIB:.2f} GiB of memory are free"
            )
        disk = None
        if config.kv_disk:
            disk = DiskTier(
                Path(config.kv_disk),
                layout,
                payload_bytes=blocks.num_rows * blocks.piece_bytes,
                max_bytes=int(config.kv_disk_gib * GIB),
            )
        return cls(rows, blocks, disk, host_bytes, news)

    @property
    def names(self) -> Sequence[Tier]:
        """The nearest first."""
        is_there: dict[Tier, bool] = {"host": self._is_host, "disk": self._disk is not None}
        return [tier for tier in is_there if is_there[tier]]

    def keep(self, message: KVStore) -> None:
        self._keeper.keep(message.blocks.tolist(), message.hashes)

    def use(self, message: KVUsed) -> None:
        self._keeper.use(message.hashes)

    def fetch(self, message: KVFetch, source: TierSource) -> None:
        self._loader.fetch(message, source)

    def cancel(self, job: int) -> None:
        """Another's job is none."""
        self._loader.cancel(job)

    def close(self) -> None:
        """What waits to be written is, if it does not take long."""
        self._loader.close()
        self._keeper.close()

    def _take_news(self) -> list[KVTierNews]:
        counts = self._counts.take()
        news = []
        if self._is_host:
            num_bytes = len(self._host) * self._block_bytes
            news.append(_news("host", self._host.take_changes(), num_bytes, counts))
        if self._disk is not None:
            news.append(_news("disk", self._disk.take_changes(), self._disk.num_bytes, counts))
        return [one for one in news if one is not None]


def _news(
    tier: Tier,
    changes: tuple[list[bytes], list[bytes]],
    num_bytes: int,
    counts: Counter[tuple[Tier, Kind]],
) -> KVTierNews | None:
    """None where nothing has happened."""
    stored, lost = changes
    num = {kind: counts[tier, kind] for kind in KINDS}
    if not (stored or lost or any(num.values())):
        return None
    return KVTierNews(
        tier=tier,
        stored=stored,
        lost=lost,
        num_bytes=num_bytes,
        num_stored=num["stored"],
        num_dropped=num["dropped"],
        num_loaded=num["loaded"],
        num_failed=num["failed"],
    )
