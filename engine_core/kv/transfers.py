"""K/V transfer as the engine and its scheduler use it.

Commands for the worker are collected in `commands`, in the order in which they were decided. The
loop sends them before the next plan, and before clients receive anything that depends on them. So a
withdrawn block is reused after its KVWithdraw, and a client gets a handle after its KVExport. The
clock is the time of the last `tick`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

from engine_core.blocks.pool import BlockPool
from engine_core.kv.fetches import Fetch, Fetches, Match
from engine_core.kv.handle import Handle
from engine_core.kv.leases import KVLeases
from engine_core.kv.peers import Peers
from engine_core.kv.tiers import TierIndex
from engine_core.request import Request
from protocol.config.engine import EngineConfig
from protocol.kv import (
    LEASE_BYTES,
    KVCancel,
    KVExport,
    KVFetch,
    KVReport,
    KVStore,
    KVUsed,
    KVWithdraw,
    TierSource,
)
from protocol.messages import Generate

KVCommand = KVExport | KVWithdraw | KVFetch | KVCancel | KVStore | KVUsed


def draw_lease() -> bytes:
    return secrets.token_bytes(LEASE_BYTES)


class KVTransfers:
    """Leases, fetches and tiers of one engine. `draw_lease` returns the name of a new lease."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        peers: Peers,
        tiers: TierIndex,
        *,
        draw_lease: Callable[[], bytes] = draw_lease,
    ) -> None:
        self.commands: list[KVCommand] = []
        self.leases = KVLeases(pool, config.kv_lease_s, self._send)
        self.fetches = Fetches([peers, tiers], config.kv_timeout_s, self._send)
        self.tiers = tiers
        self._peers = peers
        self._draw_lease = draw_lease
        self._now = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.leases and not self.fetches

    def tick(self, now: float) -> None:
        """Set the clock, and expire leases."""
        self._now = now
        self.leases.expire(now)

    # ---- called for clients

    def check(self, message: Generate) -> None:
        """Raise InvalidRequest if this engine cannot do the request's part."""
        self._peers.check(message)

    def open_handle(self, text: str, request: Request) -> Handle:
        """Return the handle of `request`. Raises InvalidRequest if it does not fit."""
        return self._peers.open_handle(text, request)

    def renew(self, handles: Iterable[str]) -> None:
        for name in filter(None, map(self._peers.lease_from_handle, handles)):
            self.leases.renew(name, self._now)

    def release(self, handles: Iterable[str]) -> None:
        for name in filter(None, map(self._peers.lease_from_handle, handles)):
            self.leases.release(name)

    # ---- called by the engine

    def announce(self, request: Request) -> None:
        """Announce the lease of a request whose last tokens the next plan computes."""
        request.lease = self._draw_lease()
        self.leases.announce(request.lease, request.blocks, request.kv_readers)

    def retract(self, request: Request) -> None:
        """Withdraw the lease of a request that ended before it was handed over."""
        if request.lease:
            self.leases.retract(request.lease)

    def hand_over(self, request: Request) -> str:
        """Keep what `request` has computed for its readers, and return the handle for them."""
        self.leases.open(request.lease, request.blocks, self._now)
        return self._peers.seal_handle(request, request.lease)

    def cancel_fetch(self, request: Request) -> None:
        """Cancel the fetch of a request that has ended."""
        self.fetches.cancel(request)

    def on_kv_report(self, report: KVReport) -> list[Fetch]:
        """Apply a report, and return the fetches that are over.

        Raises RuntimeError for a fetch that is not open, KeyError for an unknown tier.
        """
        for name in report.taken:
            self.leases.on_taken(name)
        self.tiers.on_kv_report(report)
        over = self.fetches.on_kv_report(report)
        for fetch in over:
            if isinstance(fetch.match.source, TierSource) and fetch.seconds:
                self.tiers.observe_load(fetch.match.num_blocks, fetch.seconds)
        return over

    def publish(self, request: Request, published: range) -> None:
        """Offer newly published blocks of `request` to the tiers."""
        self._send_if(self.tiers.store_command(request, published))

    def on_releasing(self, request: Request) -> None:
        """Mark blocks as used in the tiers, before `request` releases them."""
        self._send_if(self.tiers.used_command(request))

    # ---- called by the scheduler

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Return what could be fetched for a request that has its first `num_blocks` blocks."""
        return self.fetches.match(request, num_blocks)

    def start_fetch(self, request: Request, match: Match, blocks: list[int]) -> None:
        """Start filling these blocks of a request that holds them."""
        self.fetches.start(request, match, blocks, self._now)

    def yield_lease(self, request: Request) -> bool:
        """End a lease so that `request` can have its blocks. Return whether one ended."""
        return self.leases.yield_oldest(request, self._now)

    def _send_if(self, command: KVCommand | None) -> None:
        if command is not None:
            self._send(command)

    def _send(self, command: KVCommand) -> None:
        self.commands.append(command)
