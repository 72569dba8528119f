"""Block pool: counts the holders of each block, and keeps the free list.

Every block except the null block is either free or held. Blocks are allocated from the front of the
free list. A released block without cached content is inserted at the front. A released block that
the prefix cache can find is appended at the back. So blocks without cached content are used first,
and after them the cached block that was released longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine_core.blocks.prefix_cache import PrefixCache
from protocol.steps import NULL_BLOCK


class BlockPool:
    """The blocks 1 to num_blocks - 1. Block 0 is the null block, which is never allocated. The
    constructor raises ValueError if `num_blocks` is below 2.

    Each operation is O(number of blocks passed or returned).
    """

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least 2")
        #: Block -> number of requests and leases that hold it.
        self.holders = [0] * num_blocks
        self.cache = cache
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            block for block in range(num_blocks) if block != NULL_BLOCK
        )
        #: Number of free blocks whose content is in the prefix cache.
        self.num_cached = 0

    @property
    def total(self) -> int:
        """The number of blocks, without the null block."""
        return len(self.holders) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks for new content, or None if too few are free.

        Each block has one holder. Its former content is removed from the prefix cache.
        """
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        num_findable = len(self.cache)
        for block in blocks:
            self.cache.remove(block)
            self.holders[block] = 1
        self.num_cached -= num_findable - len(self.cache)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block. A free block must still be in the prefix cache."""
        for block in blocks:
            if not self.holders[block]:
                del self._free[block]
                self.num_cached -= 1
            self.holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove one holder from each of a sequence's blocks.

        The last block is freed first, so the first block stays in the prefix cache longest.
        """
        for block in reversed(blocks):
            self.holders[block] -= 1
            assert self.holders[block] >= 0, (
                f"block {block} was released more often than it was held"
            )
            if not self.holders[block]:
                self._free[block] = None
                if block in self.cache:
                    self.num_cached += 1
                else:
                    self._free.move_to_end(block, last=False)
