"""Blocks that the worker keeps beyond its cache: what is where, what goes there, what comes back.

The worker says what its tiers hold (KVReport.tiers), and only that counts: a block that was sent to
be kept is known when it is told as stored. Where that has changed since, a fetch fails and its
tokens are computed, as without tiers.

A request whose beginning is found there fetches it, if that is worth it: a few tokens are computed
in the step that is due anyway, and where loading has turned out slower than computing it is tried
now and then only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from engine_core.blocks.hash import ContentHashes
from engine_core.kv.fetches import Match
from engine_core.policy.throughput import Throughput
from engine_core.request import Request
from protocol.arrays import Int32
from protocol.kv import KVReport, KVStore, KVTierNews, KVUsed, TierSource

SLOWER = 0.9
"""What is known of the time to load counts so much less after each time that it was too long."""


@dataclass(slots=True)
class Tier:
    """What one of them holds, and what it has done so far."""

    contents: set[bytes] = field(default_factory=set)
    num_bytes: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    num_failed: int = 0
    num_dropped: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.contents)

    def hear(self, news: KVTierNews) -> None:
        self.contents.update(news.stored)
        self.contents.difference_update(news.lost)
        self.num_bytes = news.num_bytes
        self.num_stored += news.num_stored
        self.num_loaded += news.num_loaded
        self.num_failed += news.num_failed
        self.num_dropped += news.num_dropped


class TierIndex:
    """The supplier of what this engine's own worker has kept.

    names         of the worker's tiers; none: then nothing is kept and nothing found
    speed         of computing
    least_tokens  that are loaded; fewer are computed
    """

    def __init__(
        self,
        names: Sequence[str],
        hashes: ContentHashes,
        block_tokens: int,
        speed: Throughput,
        least_tokens: int,
    ) -> None:
        self._tiers = {name: Tier() for name in names}
        self._hashes = hashes
        self._block_tokens = block_tokens
        self._speed = speed
        self._least_tokens = least_tokens
        self._load_s = 0.0  # per token, the last time; 0: unknown

    # ---- what goes there

    def keep(self, request: Request, published: range) -> KVStore | None:
        """These blocks of `request` hold what their hashes say, until the next plan at least. What
        to tell the worker, if anything."""
        wanted = [index for index in published if self._is_wanted(request.hashes[index])]
        if not wanted:
            return None
        blocks = Int32.of(request.blocks[index] for index in wanted)
        return KVStore(blocks=blocks, hashes=[request.hashes[index] for index in wanted])

    def use(self, request: Request) -> KVUsed | None:
        """`request` is about to give back its blocks. Of what it has used the beginning is to stay
        longest: without it the rest cannot be found. What to tell the worker, if anything."""
        used = filter(self._has, request.hashes[: request.num_published])
        known = list(used) if self._tiers else []
        return KVUsed(hashes=known[::-1]) if known else None

    # ---- what comes back

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Also for one that was preempted. Who wants its prompt's logprobs computes it, and the
        last token is always computed: its logits are what a step is for."""
        if not self._tiers or request.params.prompt_logprobs is not None:
            return None
        usable = (len(request.tokens) - 1) // self._block_tokens
        self._hashes.extend(request.hashes, request.namespace, request.tokens, usable)
        found = list(takewhile(self._has, request.hashes[num_blocks:usable]))
        if not self._is_worth(len(found) * self._block_tokens):
            return None
        num_tokens = (num_blocks + len(found)) * self._block_tokens
        return Match(TierSource(hashes=found), len(found), num_tokens)

    def _is_worth(self, num_tokens: int) -> bool:
        if num_tokens < self._least_tokens:
            return False
        if self._load_s * self._speed.tokens_per_s <= 1:
            return True
        self._load_s *= SLOWER
        return False

    # ---- what the worker says

    def hear(self, report: KVReport) -> None:
        """Raises KeyError on a tier that WorkerReady did not name."""
        for news in report.tiers:
            self._tiers[news.tier].hear(news)

    def learn(self, num_blocks: int, seconds: float) -> None:
        """So long it took to load so many."""
        self._load_s = seconds / (num_blocks * self._block_tokens)

    def told(self, of: Callable[[Tier], int]) -> dict[str, int]:
        """By tier."""
        return {name: of(tier) for name, tier in self._tiers.items()}

    def _has(self, content: bytes) -> bool:
        return any(content in tier.contents for tier in self._tiers.values())

    def _is_wanted(self, content: bytes) -> bool:
        return not all(content in tier.contents for tier in self._tiers.values())
