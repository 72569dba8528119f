"""Tiers without a worker. They execute `KVStore`, `KVUsed` and fetches from a `TierSource`.

They store the contents that the blocks and checkpoints had when the command arrived. So one that
was sent before it was written, or after it was reused, is loaded with wrong contents. From the
command of a fetch until its report, its destination holds values that must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_core.kv.transfers import KVCommand
from protocol.worker.kv import (
    KVCancel,
    KVFailure,
    KVFetch,
    KVFetched,
    KVReport,
    KVStore,
    KVTierNews,
    KVUsed,
    TierSource,
    state_key,
)
from tests.support.handover import Blocks, spoil


class EchoTiers:
    """Tiers of an engine under test.

    jobs     fetches without a report, oldest first
    kept     tier -> key -> contents of the block, or the state
    used     the keys of every KVUsed, for tests
    stored   the hashes of every KVStore, for tests
    """

    def __init__(
        self, names: Sequence[str], kv: Blocks, block_tokens: int, states: Blocks | None = None
    ) -> None:
        self.kept: dict[str, dict[bytes, Any]] = {name: {} for name in names}
        self.jobs: dict[int, KVFetch] = {}
        self.used: list[list[bytes]] = []
        self.stored: list[list[bytes]] = []
        self._reported: dict[str, set[bytes]] = {name: set() for name in names}
        self._cancelled: set[int] = set()
        self._kv = kv
        self._states: Blocks = {} if states is None else states
        self._block_tokens = block_tokens

    def apply(self, order: KVCommand) -> None:
        match order:
            case KVStore(blocks=blocks, hashes=hashes, checkpoints=checkpoints, states=states):
                if hashes:
                    self.stored.append(hashes)
                numbers = [] if checkpoints is None else checkpoints.tolist()
                for kept in self.kept.values():
                    for number, key in zip(numbers, states, strict=True):
                        kept.setdefault(key, self._states[number])
                    for block, content in zip(blocks.tolist(), hashes, strict=True):
                        assert None not in self._kv[block], "a block that is not full"
                        kept.setdefault(content, list(self._kv[block]))
            case KVUsed(keys=keys):
                self.used.append(keys)
            case KVFetch(job=job):
                assert job not in self.jobs, "a job's number was used again"
                self.jobs[job] = order
                spoil(self._kv, self._states, order, self._block_tokens)
            case KVCancel(job=job):
                self._cancelled.add(job)

    def carry_out(self, job: int, fault: str = "", seconds: float = 0.001) -> KVReport:
        """Carry out a job, and return its report. The job fails if `fault`, the kind of failure, is
        not "", if it was cancelled, or if no tier has one of its blocks, or its state, any more."""
        order = self.jobs.pop(job)
        assert isinstance(order.source, TierSource)
        hashes, state = order.source.hashes, None
        found = [self._find(content) for content in hashes]
        if order.checkpoint is not None:
            state = self._find(state_key(hashes[-1]))
        if job in self._cancelled:
            fault = "cancelled"
        elif None in found or (order.checkpoint is not None and state is None):
            fault = fault or "lost"
        spoil(self._kv, self._states, order, self._block_tokens)
        if fault:
            return KVReport(failed=[KVFailure(job, fault, "by request of the test")])
        for block, content in zip(order.blocks.tolist(), found, strict=True):
            assert content is not None
            self._kv[block] = list(content)
        if order.checkpoint is not None:
            self._states[order.checkpoint] = state
        return KVReport(fetched=[KVFetched(job, 100 * len(found), seconds, "tier")])

    def lose(self, tier: str, key: bytes) -> None:
        """Drop a block or a state from a tier. The next `report` includes the loss."""
        self.kept[tier].pop(key, None)

    def report(self) -> KVReport:
        """Return the changes since the last call."""
        return KVReport(tiers=[self._news_of(tier) for tier in self.kept])

    def _news_of(self, tier: str) -> KVTierNews:
        reported, now = self._reported[tier], set(self.kept[tier])
        self._reported[tier] = now
        return KVTierNews(
            tier=tier,
            stored=list(now - reported),
            lost=list(reported - now),
            num_bytes=100 * len(now),
            num_stored=len(now - reported),
        )

    def _find(self, key: bytes) -> Any:
        return next((kept[key] for kept in self.kept.values() if key in kept), None)
