"""Who holds which block. Every block is free or held, never both; the null block is neither.

Free blocks wait in one line: blocks without findable content in front (used first, last freed
first), blocks that the prefix cache could still find at the back in order of release, so taking
from the front evicts the least recently used content last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine_core.blocks.prefix_cache import PrefixCache
from protocol.steps import NULL_BLOCK


class BlockPool:
    """Blocks 1 .. num_blocks - 1; block 0 is the null block.

    All operations are O(blocks touched).
    """

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks holds nothing")
        self.holders = [0] * num_blocks
        self.cache = cache
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            block for block in range(num_blocks) if block != NULL_BLOCK
        )

    @property
    def total(self) -> int:
        """Blocks that can be held: the null block does not count."""
        return len(self.holders) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for new content, each held once; None, and no change, if there are not so
        many.
        """
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.cache.forget(block)
            self.holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each: of blocks that are held already, or free but still findable."""
        for block in blocks:
            if not self.holders[block]:
                del self._free[block]
            self.holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder less for each. The end of a sequence goes first, so its beginning stays
        longest.
        """
        for block in reversed(blocks):
            self.holders[block] -= 1
            assert self.holders[block] >= 0, f"block {block} was released by nobody"
            if not self.holders[block]:
                self._free[block] = None
                if block not in self.cache:
                    self._free.move_to_end(block, last=False)
