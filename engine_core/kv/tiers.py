"""Tier index: the blocks that the worker keeps in host memory and on disk.

A block is indexed when the worker reports it as stored (KVReport.tiers). If the tier drops the
block before a request fetches it, the fetch fails, and the request computes the tokens.

A request whose prefix is in a tier fetches it, unless the prefix has too few tokens, or loading was
slower than computing when last measured. In the latter case, loading is tried again from time to
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from engine_core.blocks.hash import ContentHashes
from engine_core.kv.fetches import Match
from engine_core.policy.throughput import Throughput
from engine_core.requests.request import Request
from protocol.wire.arrays import Int32
from protocol.worker.kv import KVReport, KVStore, KVTierNews, KVUsed, TierSource

RETRY_DECAY = 0.9
"""The measured load time is multiplied by this factor each time it prevents a fetch.

So loading is eventually retried.
"""


@dataclass(slots=True)
class Tier:
    """Contents and counters of one tier, as reported by the worker."""

    #: Hashes of the stored blocks.
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
        """Apply one report of the worker: the hashes stored and lost since the last report, the
        present size, and the increments of the counters."""
        self.contents.update(news.stored)
        self.contents.difference_update(news.lost)
        self.num_bytes = news.num_bytes
        self.num_stored += news.num_stored
        self.num_loaded += news.num_loaded
        self.num_failed += news.num_failed
        self.num_dropped += news.num_dropped


class TierIndex:
    """Supplies blocks from the tiers of this engine's own worker.

    - names: names of the worker's tiers; may be empty
    - throughput: how fast the engine computes tokens, for comparison
    - min_load_tokens: fewer tokens than this are computed instead of loaded
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
        #: Seconds of loading per token, as last measured; 0 if unknown.
        self._load_s = 0.0

    # ---- storing

    def store_command(self, request: Request, published: range) -> KVStore | None:
        """Return the command to store newly published blocks of `request`.

        `published` are their indexes in the block table. Return None if all tiers have these
        blocks. The blocks keep their content at least until the next plan.
        """
        if not self._tiers:
            return None
        indexes = [index for index in published if self._should_store(request.hashes[index])]
        if not indexes:
            return None
        blocks = Int32.of(request.blocks[index] for index in indexes)
        return KVStore(blocks=blocks, hashes=[request.hashes[index] for index in indexes])

    def used_command(self, request: Request) -> KVUsed | None:
        """Return the command that marks the stored blocks of `request` as used; None if no tier has
        any of them.

        Call it before `request` releases its blocks. The first block of the sequence comes last in
        the command, so it counts as most recently used and is kept longest: the other blocks cannot
        be found without it.
        """
        used = filter(self._is_stored, request.hashes[: request.num_published])
        known = list(used) if self._tiers else []
        return KVUsed(hashes=known[::-1]) if known else None

    # ---- loading

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Return the blocks in the tiers that follow the request's first `num_blocks` blocks.

        Return None if there are none, if they have too few tokens, if computing them is expected to
        be faster, or if the request needs prompt logprobs and so must compute its whole prompt. The
        block with the last token is never loaded, because the step needs the logits of this token.
        """
        if not self._tiers or request.params.prompt_logprobs is not None:
            return None
        usable = (len(request.tokens) - 1) // self._block_tokens
        self._hashes.extend(
            request.hashes, request.namespace, request.tokens, usable, request.adapter_digest
        )
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
        self._load_s *= RETRY_DECAY
        return False

    # ---- reports

    def on_kv_report(self, report: KVReport) -> None:
        """Apply a report. Raises KeyError if the report names a tier that WorkerReady did not."""
        for news in report.tiers:
            self._tiers[news.tier].apply(news)

    def observe_load(self, num_blocks: int, seconds: float) -> None:
        """Record that loading `num_blocks` blocks took `seconds`. Only the latest load counts."""
        self._load_s = seconds / (num_blocks * self._block_tokens)

    def by_tier(self, get: Callable[[Tier], int]) -> dict[str, int]:
        """Return {name of the tier: get(tier)} for all tiers."""
        return {name: get(tier) for name, tier in self._tiers.items()}

    def _is_stored(self, content: bytes) -> bool:
        return any(content in tier.contents for tier in self._tiers.values())

    def _should_store(self, content: bytes) -> bool:
        return not all(content in tier.contents for tier in self._tiers.values())
