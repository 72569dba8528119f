"""Cached prefixes of requests: looks them up, and publishes newly filled blocks."""

from __future__ import annotations

from engine_core.blocks.hash import ContentHashes
from engine_core.blocks.prefix_cache import PrefixCache
from engine_core.request import Request
from protocol.messages import Limits


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
