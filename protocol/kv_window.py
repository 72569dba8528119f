"""K/V blocks that a sliding window needs.

In a model all of whose layers have a window, the query at position q reads the keys at positions
[q - window + 1, q]. A block is passed when no later query reads any of its positions. It is then
freed, and its entry in the block table becomes the null block, so the table's indexes still follow
from the positions. The worker plans its memory by these functions, and the engine frees blocks.

In all functions `window` is None if every block is kept until the request ends.
"""

from __future__ import annotations


def num_passed_blocks(num_computed: int, block_tokens: int, window: int | None) -> int:
    """Return how many leading blocks no query at position `num_computed` or later reads."""
    if window is None:
        return 0
    return max(num_computed + 1 - window, 0) // block_tokens


def max_live_blocks(num_new: int, block_tokens: int, window: int | None) -> int | None:
    """Return the most blocks that a step of `num_new` tokens of one request reads and writes.

    The tokens and the window before the first of them may start anywhere in a block. Return None
    if the number is not limited.
    """
    if window is None:
        return None
    return (window + num_new + block_tokens - 3) // block_tokens + 1


def max_request_tokens(
    max_len: int, *, num_blocks: int, block_tokens: int, window: int | None
) -> int:
    """Return the length of the longest request that a cache can serve, at most `max_len` tokens.

    `num_blocks` includes the null block. If the cache holds one window and the token after it, a
    request may have any length, because its blocks are reused.
    """
    usable = num_blocks - 1
    live = max_live_blocks(1, block_tokens, window)
    if live is not None and usable >= live:
        return max_len
    return min(max_len, usable * block_tokens)
