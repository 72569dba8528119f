"""Which blocks of a request's beginning are here already, and which it offers to others."""

from __future__ import annotations

from engine_core.blocks.hash import ContentHashes
from engine_core.blocks.prefix_cache import PrefixCache
from engine_core.request import Request
from protocol.messages import Limits


class Prefixes:
    """The requests' side of the prefix cache."""

    def __init__(self, limits: Limits, hashes: ContentHashes, cache: PrefixCache) -> None:
        self.hashes = hashes
        self._is_on = limits.prefix_cache
        self._block_tokens = limits.block_tokens
        self._cache = cache

    def find(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of its tokens.

        The last token is always computed: its logits are what a step is for. A request that wants
        its prompt's logprobs computes the whole prompt for the same reason.
        """
        if not self._is_on or request.params.prompt_logprobs is not None:
            return []
        usable = (len(request.tokens) - 1) // self._block_tokens
        self._extend(request, usable)
        return self._cache.match(request.hashes[:usable])

    def publish(self, request: Request) -> range:
        """Offer the blocks that it has filled since the last time. Which ones, by their index."""
        full = request.num_shareable // self._block_tokens
        published = range(request.num_published, full) if self._is_on else range(0)
        if published:
            self._extend(request, full)
            for index in published:
                self._cache.publish(
                    request.hashes[index], request.blocks[index], is_followed=request.follows
                )
            request.num_published = full
        return published

    def _extend(self, request: Request, num_blocks: int) -> None:
        self.hashes.extend(request.hashes, request.namespace, request.tokens, num_blocks)
