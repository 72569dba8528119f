"""Everything about K/V transfer in one object: leases, fetches and tiers of an engine.

Commands for the worker are collected in `commands`, in order. The loop sends them before the next
plan, and before it sends Outputs to clients. So a block of an ended lease is reused only after its
KVWithdraw was sent, and a client receives a handle only after its KVExport was sent. The time of
the last `tick` counts as the current time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

from engine_core.blocks.pool import BlockPool
from engine_core.kv.fetches import Fetch, Fetches, Match
from engine_core.kv.leases import KVLeases
from engine_core.kv.peers import Peers
from engine_core.kv.tiers import TierIndex
from engine_core.requests.kv_handle import Handle
from engine_core.requests.request import Request
from protocol.config.engine import EngineConfig
from protocol.engine.messages import Generate
from protocol.worker.kv import (
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

KVCommand = KVExport | KVWithdraw | KVFetch | KVCancel | KVStore | KVUsed


def draw_lease() -> bytes:
    return secrets.token_bytes(LEASE_BYTES)


class KVTransfers:
    """All K/V transfers of one engine. `draw_lease` returns the name of a new lease."""

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
        """Raise InvalidRequest if this engine cannot serve the K/V fields of `message`."""
        self._peers.check(message)

    def open_handle(self, text: str, request: Request) -> Handle:
        """Return the handle in `text`. Raises InvalidRequest if it does not fit `request`."""
        return self._peers.open_handle(text, request)

    def renew(self, handles: Iterable[str]) -> None:
        for name in filter(None, map(self._peers.lease_from_handle, handles)):
            self.leases.renew(name, self._now)

    def release(self, handles: Iterable[str]) -> None:
        for name in filter(None, map(self._peers.lease_from_handle, handles)):
            self.leases.release(name)

    # ---- called by the engine

    def announce(self, request: Request, checkpoint: int | None) -> None:
        """Announce the lease of a request whose last tokens are computed by the next plan.
        `checkpoint`, which the request keeps, has the state after them; None if the model has no
        recurrent state."""
        request.lease = self._draw_lease()
        self.leases.announce(request.lease, request.blocks, request.kv_readers, checkpoint)

    def retract(self, request: Request) -> None:
        """Withdraw the announced lease of a request that ends without handing over its K/V."""
        if request.lease:
            self.leases.retract(request.lease)

    def hand_over(self, request: Request) -> str:
        """Open the announced lease on the blocks of `request`, and return the handle for its
        readers."""
        self.leases.open(request, self._now)
        return self._peers.seal_handle(request, request.lease)

    def cancel_fetch(self, request: Request) -> None:
        """Cancel the fetch of a request that has ended."""
        self.fetches.cancel(request)

    def on_kv_report(self, report: KVReport) -> list[Fetch]:
        """Apply a report, and return the fetches that are over. Raises RuntimeError if the report
        names a fetch that is not open, and KeyError if it names an unknown tier."""
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

    def publish_state(self, content: bytes, checkpoint: int) -> None:
        """Offer the state in a newly cached checkpoint, which follows the block with this hash, to
        the tiers."""
        self._send_if(self.tiers.store_state_command(content, checkpoint))

    def on_releasing(self, request: Request) -> None:
        """Mark the blocks and states of `request`, which is about to release its blocks, as used in
        the tiers."""
        self._send_if(self.tiers.used_command(request))

    # ---- called by the scheduler

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Return the K/V that can be fetched for a request about to be admitted, or None. The K/V
        of the first `num_blocks` blocks is already in the prefix cache."""
        return self.fetches.match(request, num_blocks)

    def start_fetch(
        self, request: Request, match: Match, blocks: list[int], checkpoint: int | None
    ) -> None:
        """Start the fetch that fills `blocks` and `checkpoint`, which the request holds.
        `checkpoint` is None if the model has no recurrent state."""
        self.fetches.start(request, match, blocks, checkpoint, self._now)

    def yield_lease(self, request: Request) -> bool:
        """End the oldest lease if it yields to `request` (leases.py). Return whether it ended."""
        return self.leases.yield_oldest(request, self._now)

    def _send_if(self, command: KVCommand | None) -> None:
        if command is not None:
            self._send(command)

    def _send(self, command: KVCommand) -> None:
        self.commands.append(command)
