"""K/V that changes hands, as an engine and its scheduler see it.

What the worker must be told gathers in `orders`, in the order in which it was decided; whoever owns
the socket sends them before the next plan, and before clients hear what follows from them. So a
withdrawn block is reused behind its KVWithdraw, and a handle is told behind its KVExport. The clock
is what `tick` said last.
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

Order = KVExport | KVWithdraw | KVFetch | KVCancel | KVStore | KVUsed


def draw_lease() -> bytes:
    return secrets.token_bytes(LEASE_BYTES)


class KVTransfers:
    """draw_lease  a new lease's name"""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        peers: Peers,
        tiers: TierIndex,
        *,
        draw_lease: Callable[[], bytes] = draw_lease,
    ) -> None:
        self.orders: list[Order] = []
        self.leases = KVLeases(pool, config.kv_lease_s, self._tell)
        self.fetches = Fetches([peers, tiers], config.kv_timeout_s, self._tell)
        self.tiers = tiers
        self._peers = peers
        self._draw_lease = draw_lease
        self._now = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.leases and not self.fetches

    def tick(self, now: float) -> None:
        """It is `now`: what is over ends."""
        self._now = now
        self.leases.expire(now)

    # ---- what clients ask for

    def check(self, message: Generate) -> None:
        """Raises InvalidRequest where this engine cannot do its part."""
        self._peers.check(message)

    def read(self, text: str, request: Request) -> Handle:
        """Raises InvalidRequest where the handle is not for `request`."""
        return self._peers.read(text, request)

    def keep(self, handles: Iterable[str]) -> None:
        for name in filter(None, map(self._peers.lease_of, handles)):
            self.leases.keep(name, self._now)

    def release(self, handles: Iterable[str]) -> None:
        for name in filter(None, map(self._peers.lease_of, handles)):
            self.leases.release(name)

    # ---- what the engine does

    def announce(self, request: Request) -> None:
        """The step that is about to be told computes the last of what its readers want."""
        request.lease = self._draw_lease()
        self.leases.announce(request.lease, request.blocks, request.kv_readers)

    def retract(self, request: Request) -> None:
        """It has ended before it was handed over."""
        if request.lease:
            self.leases.retract(request.lease)

    def hand_over(self, request: Request) -> str:
        """Keep what `request` has computed for its readers; the handle that they need."""
        self.leases.open(request.lease, request.blocks, self._now)
        return self._peers.write(request, request.lease)

    def give_up(self, request: Request) -> None:
        """It has ended while its blocks were being filled."""
        self.fetches.give_up(request)

    def hear(self, report: KVReport) -> list[Fetch]:
        """The fetches that are over. Raises RuntimeError on one that is not out, KeyError on a
        tier that there is not."""
        for name in report.taken:
            self.leases.take(name)
        self.tiers.hear(report)
        over = self.fetches.hear(report)
        for fetch in over:
            if isinstance(fetch.match.source, TierSource) and fetch.seconds:
                self.tiers.learn(fetch.match.num_blocks, fetch.seconds)
        return over

    def publish(self, request: Request, published: range) -> None:
        """These blocks of `request` hold what their hashes say."""
        self._tell_if(self.tiers.keep(request, published))

    def leave(self, request: Request) -> None:
        """It is about to give back its blocks."""
        self._tell_if(self.tiers.use(request))

    # ---- what the scheduler asks for

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """What could be fetched for a request that has its first `num_blocks` blocks."""
        return self.fetches.match(request, num_blocks)

    def begin(self, request: Request, match: Match, blocks: list[int]) -> None:
        """Have these blocks filled, of a request that owns them."""
        self.fetches.begin(request, match, blocks, self._now)

    def make_way(self, request: Request) -> bool:
        """Give something up that is kept for others, so that `request` can have its blocks; False:
        there is nothing that it may have."""
        return self.leases.make_way(request, self._now)

    def _tell_if(self, order: Order | None) -> None:
        if order is not None:
            self._tell(order)

    def _tell(self, order: Order) -> None:
        self.orders.append(order)
