"""Prefix cache: content hash -> block, for blocks whose writing step has committed.

A block can be found while it is held and while it stands in the pool's free list. It is removed
when the pool allocates it for new content. The cache holds no block itself.

For each block the cache also records whether the draft model has computed its own K/V for it
(drafting.py explains when it has not). A request that finds such a block need not compute it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from engine_core.blocks.hash import ContentHashes
from engine_core.request import Request
from protocol.messages import Limits


class PrefixCache:
    """Content hash <-> block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._draft_computed: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    def publish(self, content: bytes, block: int, *, is_draft_computed: bool) -> None:
        """Make `block` findable as `content`, unless another block already is.

        `is_draft_computed`: the draft model's K/V for it exists too.
        """
        if content not in self._block_of and block not in self._hash_of:
            self._block_of[content] = block
            self._hash_of[block] = content
        if is_draft_computed and block in self._hash_of:
            self._draft_computed.add(block)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`."""
        found: list[int] = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def num_draft_computed(self, found: Sequence[int]) -> int:
        """Return how many leading blocks of `found` the draft model has computed."""
        return sum(1 for _ in takewhile(self._draft_computed.__contains__, found))

    def remove(self, block: int) -> None:
        """Remove `block`, which is about to be overwritten."""
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
            self._draft_computed.discard(block)

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()
        self._draft_computed.clear()

    def items(self) -> dict[int, bytes]:
        """Return a copy of block -> hash, for checks."""
        return dict(self._hash_of)


class Prefixes:
    """The prefix cache as requests use it: matches their tokens, publishes their blocks."""

    def __init__(self, limits: Limits, hashes: ContentHashes, cache: PrefixCache) -> None:
        self.hashes = hashes
        self._is_enabled = limits.prefix_cache
        self._block_tokens = limits.block_tokens
        self._cache = cache

    def find(self, request: Request) -> list[int]:
        """Return the cached blocks that hold the beginning of the request's tokens.

        The last token is always computed, because the step needs its logits. A request with prompt
        logprobs computes its whole prompt for the same reason.
        """
        if not self._is_enabled or request.params.prompt_logprobs is not None:
            return []
        usable = (len(request.tokens) - 1) // self._block_tokens
        self._extend(request, usable)
        return self._cache.match(request.hashes[:usable])

    def publish(self, request: Request) -> range:
        """Publish the blocks filled since the last call, and return their indexes."""
        full = request.num_shareable // self._block_tokens
        published = range(request.num_published, full) if self._is_enabled else range(0)
        if published:
            self._extend(request, full)
            for index in published:
                self._cache.publish(
                    request.hashes[index],
                    request.blocks[index],
                    is_draft_computed=request.uses_draft_model,
                )
            request.num_published = full
        return published

    def _extend(self, request: Request, num_blocks: int) -> None:
        self.hashes.extend(request.hashes, request.namespace, request.tokens, num_blocks)
