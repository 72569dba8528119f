"""The prefix cache of the light model: whole segments instead of blocks.

A segment is in the cache once a prompt with it was computed. While requests use it, it is held.
After that it is free, but still cached, until its blocks are needed: the segment released longest
ago goes first. The numbers of blocks are those of the real pool, except that a growing answer takes
a fraction of a block per token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.requests import Segment


@dataclass(slots=True)
class CachedSegment:
    """A segment whose K/V is computed."""

    num_blocks: int
    #: Number of requests that use it.
    num_users: int


class LightCache:
    """The blocks of one replica.

    num_blocks    blocks without the null block
    block_tokens  tokens of a block
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        #: Blocks that requests use.
        self.held = 0.0
        self._num_free_cached = 0
        self._segments: dict[int, CachedSegment] = {}
        #: Keys of the segments that no request uses, released longest ago first.
        self._free: OrderedDict[int, None] = OrderedDict()

    def match(self, path: Sequence[Segment]) -> tuple[int, int]:
        """Return how many leading segments are cached, and their tokens."""
        segments, num, tokens = self._segments, 0, 0
        for key, size in path:
            if key not in segments:
                break
            num += 1
            tokens += size
        return num, tokens

    def allocate(self, keys: Sequence[int], num_new: int) -> bool:
        """Hold these cached segments and `num_new` more blocks. Return False, and change nothing,
        if they do not fit."""
        segments, revived = self._segments, 0
        for key in keys:
            segment = segments[key]
            if not segment.num_users:
                revived += segment.num_blocks
        if self.held + num_new + revived > self.num_blocks:
            return False
        for key in keys:
            segment = segments[key]
            if not segment.num_users:
                del self._free[key]
            segment.num_users += 1
        self.held += num_new + revived
        self._num_free_cached -= revived
        self.evict()
        return True

    def grow(self, num_tokens: int) -> None:
        """Hold blocks for tokens that are added to answers."""
        self.held += num_tokens / self.block_tokens
        if self.held + self._num_free_cached > self.num_blocks:
            self.evict()

    def can_grow(self, num_tokens: int) -> bool:
        return self.held + num_tokens / self.block_tokens <= self.num_blocks

    def publish(self, key: int, num_blocks: int) -> bool:
        """Cache a segment of blocks that are held; the caller uses it. Return False if it is cached
        already, so that the caller's blocks are a copy."""
        if key in self._segments:
            return False
        self._segments[key] = CachedSegment(num_blocks, 1)
        return True

    def release(self, keys: Sequence[int], num_private: float) -> None:
        """Stop using the segments, last one first, and free `num_private` blocks without content
        that can be found."""
        self.held -= num_private
        segments, free = self._segments, self._free
        for key in reversed(keys):
            segment = segments[key]
            segment.num_users -= 1
            if not segment.num_users:
                free[key] = None
                self.held -= segment.num_blocks
                self._num_free_cached += segment.num_blocks

    def evict(self) -> None:
        """Forget free segments until all blocks fit."""
        free, segments = self._free, self._segments
        while free and self.held + self._num_free_cached > self.num_blocks:
            key, _ = free.popitem(last=False)
            self._num_free_cached -= segments.pop(key).num_blocks
