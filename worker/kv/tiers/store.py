"""The host and disk tiers of a worker, as one object that the worker's loop calls.

`store`, `touch`, `fetch` and `cancel` do not wait for the disk. Their results are in the reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from protocol.config.worker import WorkerConfig
from protocol.tools.start_facts import GIB
from protocol.worker.kv import KVFetch, KVStore, KVTierNews, KVUsed, TierSource
from worker.device.device import free_bytes
from worker.kv.blocks import WORD_BYTES, CacheBlocks
from worker.kv.report_queue import ReportQueue
from worker.kv.tiers.changes import KINDS, Counts, Kind, Tier
from worker.kv.tiers.disk import DiskTier, StoredLayout
from worker.kv.tiers.host import HostMemory, HostTier, PlacedMemory, num_parts
from worker.kv.tiers.reader import TierReader
from worker.kv.tiers.writer import TierMemories, TierWriter, max_unwritten

MAX_STATE_PLACES = 1024
"""Most places that a state takes. Each is copied by a call of its own, so there must not be many of
them if blocks are small, or store nothing."""


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """Memory whose blocks are stored: the K/V cache, or the checkpoints of recurrent states.

    rows     its bytes (PagedCache.rows)
    blocks   the same, for copies into it
    layout   digest for the files of its blocks (worker/kv/layout.py)
    """

    rows: Tensor
    blocks: CacheBlocks
    layout: bytes

    @property
    def stored_layout(self) -> StoredLayout:
        return StoredLayout(self.layout, self.blocks.block_bytes)


class TierStore:
    """The host tier and the disk tier, with their two threads.

    cache        the K/V cache
    states       the checkpoints; None: the model has no recurrent state
    host_bytes   size of the host tier; 0: there is none, and host memory only buffers disk writes
    disk         None: there is no disk tier

    Raises ValueError if `host_bytes` is neither 0 nor enough for one block, and for one state.
    """

    def __init__(
        self,
        cache: StoredMemory,
        states: StoredMemory | None,
        disk: DiskTier | None,
        host_bytes: int,
        reports: ReportQueue,
    ) -> None:
        self._has_host = host_bytes > 0
        self._disk = disk
        self._counts = Counts()
        self._place_bytes = _place_bytes(cache, states)
        num_places = self._num_state_places(states)
        capacity = host_bytes // self._place_bytes
        if not host_bytes:
            capacity = max_unwritten(self._place_bytes, num_places)
        if states is not None and capacity <= num_places:
            raise ValueError(
                f"{host_bytes:,} bytes of host memory are less than one block and one recurrent "
                f"state ({self._place_bytes + states.blocks.block_bytes:,} bytes)"
            )
        self._host = HostTier(capacity)
        num_scratch = max(num_places, 1)
        memory = HostMemory(self._place_bytes, capacity + num_scratch, cache.rows.device)
        memories = TierMemories(
            PlacedMemory(cache.rows, cache.blocks, memory),
            None if states is None else PlacedMemory(states.rows, states.blocks, memory),
        )
        self._writer = TierWriter(
            self._host, memory, memories, disk, self._counts, self.names, reports
        )
        self._reader = TierReader(
            [each.blocks for each in (cache, states) if each is not None],
            memories,
            self._host if host_bytes else None,
            tuple(range(capacity, capacity + num_scratch)),
            disk,
            self._counts,
            reports,
        )
        reports.set_tier_reports(self._drain_reports)

    def _num_state_places(self, states: StoredMemory | None) -> int:
        """Return how many places a state takes; 0: the model has none."""
        return 0 if states is None else num_parts(states.blocks, self._place_bytes)

    @classmethod
    def from_config(
        cls,
        config: WorkerConfig,
        cache: StoredMemory,
        states: StoredMemory | None,
        reports: ReportQueue,
    ) -> Self | None:
        """Return the configured tiers, or None if none is configured. Raises OSError if the
        directory cannot be used. Raises ValueError if the configured memory or disk space is less
        than a block or a state, or if the memory is more than is free."""
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
                cache.stored_layout,
                None if states is None else states.stored_layout,
                max_bytes=int(config.kv_disk_gib * GIB),
            )
        return cls(cache, states, disk, host_bytes, reports)

    @property
    def names(self) -> Sequence[Tier]:
        """Return the names of the tiers, the fastest first."""
        is_there: dict[Tier, bool] = {"host": self._has_host, "disk": self._disk is not None}
        return [tier for tier in is_there if is_there[tier]]

    def store(self, message: KVStore) -> None:
        self._writer.store(message)

    def touch(self, message: KVUsed) -> None:
        self._writer.touch(message.keys)

    def fetch(self, message: KVFetch, source: TierSource) -> None:
        self._reader.fetch(message, source)

    def cancel(self, job: int) -> None:
        """Cancel a job. An unknown job is ignored."""
        self._reader.cancel(job)

    def close(self) -> None:
        """Stop both threads. Contents that wait for the disk are still written, for at most
        CLOSE_S."""
        self._reader.close()
        self._writer.close()

    def _drain_reports(self) -> list[KVTierNews]:
        counts = self._counts.drain()
        reports = []
        if self._has_host:
            num_bytes = self._host.num_published * self._place_bytes
            reports.append(_tier_report("host", self._host.drain_changes(), num_bytes, counts))
        if self._disk is not None:
            changes, num_bytes = self._disk.drain_changes(), self._disk.num_bytes
            reports.append(_tier_report("disk", changes, num_bytes, counts))
        return [report for report in reports if report is not None]


def _place_bytes(cache: StoredMemory, states: StoredMemory | None) -> int:
    """Return the size of a place of the host tier: that of a block, unless a state would take more
    than MAX_STATE_PLACES places."""
    least = 0 if states is None else -(-states.blocks.block_bytes // MAX_STATE_PLACES)
    return max(cache.blocks.block_bytes, -(-least // WORD_BYTES) * WORD_BYTES)


def _tier_report(
    tier: Tier,
    changes: tuple[list[bytes], list[bytes]],
    num_bytes: int,
    counts: Counter[tuple[Tier, Kind]],
) -> KVTierNews | None:
    """Return the report of one tier, or None if there is nothing to report."""
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
