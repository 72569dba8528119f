"""Tier index: the blocks and states that the worker keeps in host memory and on disk.

A block is indexed when the worker reports it as stored (KVReport.tiers). If the tier drops the
block before a request fetches it, the fetch fails, and the request computes the tokens.

If the model has a recurrent state, the tiers also keep the states of cached checkpoints. A prefix
is then found up to the last boundary that has all its blocks and a state.

A request whose prefix is in a tier fetches it, unless the prefix has too few tokens, or loading was
slower than computing when last measured. In the latter case, loading is tried again from time to
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile

from engine_core.blocks.hash import ContentHashes
from engine_core.kv.fetches import Match
from engine_core.policy.throughput import Throughput
from engine_core.requests.request import Request
from protocol.engine.messages import Limits
from protocol.wire.arrays import Int32
from protocol.worker.kv import (
    KVReport,
    KVStore,
    KVTierNews,
    KVUsed,
    TierSource,
    is_state_key,
    state_key,
)

RETRY_DECAY = 0.9
"""The measured load time is multiplied by this factor each time it prevents a fetch.

So loading is eventually retried.
"""


@dataclass(slots=True)
class Tier:
    """Contents and counters of one tier, as reported by the worker."""

    #: Hashes of the stored blocks.
    contents: set[bytes] = field(default_factory=set)
    #: Keys of the stored states.
    states: set[bytes] = field(default_factory=set)
    num_bytes: int = 0
    num_stored: int = 0
    num_loaded: int = 0
    num_failed: int = 0
    num_dropped: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.contents)

    def apply(self, news: KVTierNews) -> None:
        """Apply one report of the worker: the keys stored and lost since the last report, the
        present size, and the increments of the counters."""
        for key in news.stored:
            self._keys_like(key).add(key)
        for key in news.lost:
            self._keys_like(key).discard(key)
        self.num_bytes = news.num_bytes
        self.num_stored += news.num_stored
        self.num_loaded += news.num_loaded
        self.num_failed += news.num_failed
        self.num_dropped += news.num_dropped

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys_like(key)

    def _keys_like(self, key: bytes) -> set[bytes]:
        return self.states if is_state_key(key) else self.contents


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
        limits: Limits,
        throughput: Throughput,
        min_load_tokens: int,
    ) -> None:
        self._tiers = {name: Tier() for name in names}
        self._hashes = hashes
        self._block_tokens = limits.block_tokens
        self._throughput = throughput
        self._min_load_tokens = min_load_tokens
        self._has_state = limits.state_bytes > 0
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

    def store_state_command(self, content: bytes, checkpoint: int) -> KVStore | None:
        """Return the command to store the state in a newly cached checkpoint, which follows the
        block with this hash. Return None if all tiers have it. The checkpoint keeps its content at
        least until the next plan."""
        key = state_key(content)
        if not self._tiers or not self._should_store(key):
            return None
        ids = Int32.of([checkpoint])
        return KVStore(blocks=Int32.of([]), hashes=[], checkpoints=ids, states=[key])

    def used_command(self, request: Request) -> KVUsed | None:
        """Return the command that marks the stored blocks and states of `request` as used; None if
        no tier has any of them.

        Call it before `request` releases its blocks. The first block of the sequence comes last in
        the command, so it counts as most recently used and is kept longest: the other blocks cannot
        be found without it. For the same reason a state comes before its block.
        """
        if not self._tiers:
            return None
        hashes = request.hashes[: request.num_published]
        keys = chain.from_iterable(map(self._keys_of, hashes)) if self._has_state else hashes
        known = list(filter(self._is_stored, keys))
        return KVUsed(keys=known[::-1]) if known else None

    def _keys_of(self, content: bytes) -> tuple[bytes, bytes]:
        return content, state_key(content)

    # ---- loading

    def match(self, request: Request, num_blocks: int) -> Match | None:
        """Return the blocks in the tiers that follow the request's first `num_blocks` blocks.

        Return None if there are none, if they have too few tokens, if computing them is expected to
        be faster, or if the request needs prompt logprobs and so must compute its whole prompt. The
        block with the last token is never loaded, because the step needs the logits of this token.
        If the model has a recurrent state, the last block is one that a stored state follows.
        """
        if not self._tiers or request.params.prompt_logprobs is not None:
            return None
        usable = (len(request.tokens) - 1) // self._block_tokens
        self._hashes.extend(
            request.hashes,
            request.namespace,
            request.tokens,
            usable,
            request.adapter_digest,
            request.images,
        )
        found = list(takewhile(self._is_stored, request.hashes[num_blocks:usable]))
        while found and not self._is_resumable(request, num_blocks + len(found)):
            found.pop()
        if not self._is_worth_loading(len(found) * self._block_tokens):
            return None
        num_tokens = (num_blocks + len(found)) * self._block_tokens
        return Match(TierSource(hashes=found), len(found), num_tokens)

    def _is_resumable(self, request: Request, num_blocks: int) -> bool:
        """Return whether a request can continue after its first `num_blocks` blocks: no run that is
        computed as a whole is cut, and a stored state follows them if the model has one."""
        num_tokens = num_blocks * self._block_tokens
        if request.last_end(num_tokens) < num_tokens:
            return False
        return not self._has_state or self._is_stored(state_key(request.hashes[num_blocks - 1]))

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

    def _is_stored(self, key: bytes) -> bool:
        return any(key in tier for tier in self._tiers.values())

    def _should_store(self, key: bytes) -> bool:
        return not all(key in tier for tier in self._tiers.values())
