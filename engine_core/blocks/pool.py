"""Block pool: counts the holders of each block, and keeps the free blocks.

Every block except the null block is either free or held. Free blocks are allocated in this order:

1. blocks without cached content
2. *passed* blocks: cached blocks whose last holder released them because its window had passed
   them, or because no checkpoint of the recurrent state follows them (checkpoints.py). Only another
   prompt that shares no more than this beginning can still use them
3. other cached blocks

Within 2 and 3, the block that was released longest ago comes first. A passed block that is found
all the same, or that another prompt has missed, is *proven*: when a window passes it again, it
counts as one of the other cached blocks. So the beginning of many prompts stays in the cache, and
the middle of a single one leaves it first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine_core.blocks.prefix_cache import PrefixCache
from protocol.worker.steps import NULL_BLOCK


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
        #: Free blocks that are not passed: first those without cached content, then the others.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            block for block in range(num_blocks) if block != NULL_BLOCK
        )
        #: Free blocks that are passed.
        self._passed: OrderedDict[int, None] = OrderedDict()
        #: Cached blocks that are useful although a window has passed them.
        self._proven: set[int] = set()
        #: Number of free blocks whose content is in the prefix cache.
        self.num_cached = 0

    @property
    def total(self) -> int:
        """The number of blocks, without the null block."""
        return len(self.holders) - 1

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._passed)

    def is_free(self, block: int) -> bool:
        return block in self._free or block in self._passed

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks for new content, or None if too few are free.

        Each block has one holder. Its former content is removed from the prefix cache.
        """
        if count > self.num_free:
            return None
        num_empty = min(count, self.num_free - self.num_cached)
        num_passed = min(count - num_empty, len(self._passed))
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_empty)]
        blocks += [self._passed.popitem(last=False)[0] for _ in range(num_passed)]
        blocks += [self._free.popitem(last=False)[0] for _ in range(count - len(blocks))]
        num_findable = len(self.cache)
        for block in blocks:
            self.cache.remove(block)
            self.holders[block] = 1
        self._proven.difference_update(blocks)
        self.num_cached -= num_findable - len(self.cache)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block. A free block must still be in the prefix cache."""
        for block in blocks:
            if not self.holders[block]:
                if block in self._passed:
                    del self._passed[block]
                    self._proven.add(block)
                else:
                    del self._free[block]
                self.num_cached -= 1
            self.holders[block] += 1

    def replace(self, content: bytes, block: int, *, is_draft_computed: bool) -> None:
        """Let a held `block` take the place of a free block with the same content in the prefix
        cache, if there is one. The free block then has no cached content."""
        old = self.cache.find(content)
        if old is None or self.holders[old]:
            return
        self.cache.move(content, block, is_draft_computed=is_draft_computed)
        if old in self._proven:
            self._proven.remove(old)
            self._proven.add(block)
        self._passed.pop(old, None)
        self._free[old] = None
        self._free.move_to_end(old, last=False)
        self.num_cached -= 1

    def prove(self, blocks: Iterable[int]) -> None:
        """Mark held blocks as worth caching after the attention window has passed them, because
        other prompts use them."""
        self._proven.update(blocks)

    def release(self, blocks: list[int], *, passed: bool = False) -> None:
        """Remove one holder from each of a sequence's blocks.

        The last block is freed first, so the first block stays in the prefix cache longest.
        `passed` is whether the window of the sequence has passed the blocks, or no checkpoint of
        its state follows them.
        """
        for block in reversed(blocks):
            self.holders[block] -= 1
            assert self.holders[block] >= 0, (
                f"block {block} was released more often than it was held"
            )
            if self.holders[block]:
                continue
            if block not in self.cache:
                self._proven.discard(block)
                self._free[block] = None
                self._free.move_to_end(block, last=False)
                continue
            self.num_cached += 1
            if passed and block not in self._proven:
                self._passed[block] = None
            else:
                self._free[block] = None
