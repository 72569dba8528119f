"""Tier index: which blocks the worker keeps in host memory and on disk.

Only the worker's reports (KVReport.tiers) count: a block sent to a tier is indexed when it is
reported as stored. If the tier has dropped it since, the fetch fails, and the tokens are computed
as they would be without tiers.

A request whose prefix is found in a tier fetches it if that pays off. A few tokens are computed in
the next step anyway. If loading has proved slower than computing, it is only tried now and then.
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
"""Decay of the measured load time each time it was too long, so that loading is retried."""


@dataclass(slots=True)
class Tier:
    """The content and the counters of one tier."""

    contents: set[bytes] = field(default_factory=set)
    num_bytes: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    num_failed: int = 0
    num_dropped: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.contents)

    def apply(self, news: KVTierNews) -> None:
        """Apply one report."""
        self.contents.update(news.stored)
        self.contents.difference_update(news.lost)
        self.num_bytes = news.num_bytes
        self.num_stored += news.num_stored
        self.num_loaded += news.num_loaded
        self.num_failed += news.num_failed
        self.num_dropped += news.num_dropped


class TierIndex:
    """The supplier of blocks from the tiers of this engine's own worker.

    - names: the worker's tiers; may be empty
    - throughput: of computing
    - min_load_tokens: fewer tokens are computed instead of loaded
    """

    def __init__(
        self,
        names: Sequence[str],
        hashes: ContentHashes,
        block_tokens: int,
        throughput: Throughput,
        min_load_tokens: int,
    ) -> None:
        self._tiers = {name: Tier() for name in names}
        self._hashes = hashes
        self._block_tokens = block_tokens
        self._throughput = throughput
        self._min_load_tokens = min_load_tokens
        self._load_s = 0.0  # per token, as last measured; 0 if unknown

    # ---- storing

    def store_command(self, request: Request, published: range) -> KVStore | None:
        """Return the command to store newly published blocks of `request`, or None.

        The blocks keep their content at least until the next plan.
        """
        indexes = [index for index in published if self._should_store(request.hashes[index])]
        if not indexes:
            return None
        blocks = Int32.of(request.blocks[index] for index in indexes)
        return KVStore(blocks=blocks, hashes=[request.hashes[index] for index in indexes])

    def used_command(self, request: Request) -> KVUsed | None:
        """Return the command that marks blocks as used, before `request` releases them, or None.

        The beginning of the sequence comes last, so it is kept longest: later blocks cannot be
        found without it.
        """
        used = filter(self._is_stored, request.hashes[: request.num_published])
        known = list(used) if self._tiers else []
        return KVUsed(hashes=known[::-1]) if known else None

    # ---- loading

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Return what can be loaded for a request, which may have been preempted before.

        A request with prompt logprobs computes its prompt. The last token is always computed,
        because the step needs its logits.
        """
        if not self._tiers or request.params.prompt_logprobs is not None:
            return None
        usable = (len(request.tokens) - 1) // self._block_tokens
        self._hashes.extend(request.hashes, request.namespace, request.tokens, usable)
        found = list(takewhile(self._is_stored, request.hashes[num_blocks:usable]))
        if not self._is_worth_loading(len(found) * self._block_tokens):
            return None
        num_tokens = (num_blocks + len(found)) * self._block_tokens
        return Match(TierSource(hashes=found), len(found), num_tokens)

    def _is_worth_loading(self, num_tokens: int) -> bool:
        if num_tokens < self._min_load_tokens:
            return False
        if self._load_s * self._throughput.tokens_per_s <= 1:
            return True
        self._load_s *= SLOWER
        return False

    # ---- reports

    def on_kv_report(self, report: KVReport) -> None:
        """Apply a report. Raises KeyError for a tier that WorkerReady did not name."""
        for news in report.tiers:
            self._tiers[news.tier].apply(news)

    def observe_load(self, num_blocks: int, seconds: float) -> None:
        """Record how long it took to load `num_blocks` blocks."""
        self._load_s = seconds / (num_blocks * self._block_tokens)

    def by_tier(self, get: Callable[[Tier], int]) -> dict[str, int]:
        """Return a value of each tier, by its name."""
        return {name: get(tier) for name, tier in self._tiers.items()}

    def _is_stored(self, content: bytes) -> bool:
        return any(content in tier.contents for tier in self._tiers.values())

    def _should_store(self, content: bytes) -> bool:
        return not all(content in tier.contents for tier in self._tiers.values())
