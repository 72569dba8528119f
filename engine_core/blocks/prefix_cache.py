"""Which block holds which content: hash -> block, for blocks whose writing step has committed.

A block stays findable while it is held and while it waits in the pool's free list; it is forgotten
at the moment the pool hands it out for new content. The cache owns no block.

Of each it is known whether a draft model has computed it, too, in its own K/V (drafting.py says
why it may not have): one that finds it then need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


class PrefixCache:
    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._followed: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    def publish(self, content: bytes, block: int, *, is_followed: bool) -> None:
        """`block` holds `content`, of a draft model as well if it `is_followed`. If another block
        does already, that one stays the findable one.
        """
        if content not in self._block_of and block not in self._hash_of:
            self._block_of[content] = block
            self._hash_of[block] = content
        if is_followed and block in self._hash_of:
            self._followed.add(block)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known beginning of `hashes`."""
        found: list[int] = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def num_followed(self, found: Sequence[int]) -> int:
        """How many of these blocks, from the first on, a draft model has computed."""
        return sum(1 for _ in takewhile(self._followed.__contains__, found))

    def forget(self, block: int) -> None:
        """`block` is about to hold something else."""
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
            self._followed.discard(block)

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()
        self._followed.clear()

    def items(self) -> dict[int, bytes]:
        """block -> hash, a copy, for checks."""
        return dict(self._hash_of)
