"""K/V blocks that a sliding window needs.

In a layer with a window, the query at position q reads the keys at positions q - window + 1 to q. A
block is passed if no later query reads any of its positions. The engine then frees it, and its
entry in the block table becomes the null block, so that entry i still stands for the same
positions. The worker uses these functions to plan the memory of its K/V cache, and the engine uses
them to free blocks.

There are three cases. In all functions, `window` and `groups` say which one applies:

- Both are None: every block is kept until its request ends. No layer has a window, or a feature of
  the server needs all blocks (worker/startup/kv_window.py).
- `window` is the longest window in tokens: all layers have one. A block stores its positions in all
  layers and is freed when all of them have passed it.
- `groups` is set: only some layers have a window. A block stores layers of one group only. Blocks
  of the layers with a window are freed when they are passed.
"""

from __future__ import annotations

import msgspec


class KVGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The K/V groups of a model in which only some layers have a window.

    Each column of a block table stands for `block_tokens` positions, and has 1 + `window_blocks`
    entries. The first is the block of the layers without a window. The others are the blocks of the
    layers with one. All blocks of the cache have the same size, so each of them can be an entry of
    either kind. Column c has the entries
    [c * (1 + window_blocks), (c + 1) * (1 + window_blocks)) of the table.

    window          longest window of the layers that have one, in tokens
    window_blocks   blocks of a column that store the layers with a window
    """

    window: int
    window_blocks: int


def num_column_blocks(groups: KVGroups | None) -> int:
    """Return the number of blocks in a column of a block table: 1 without groups."""
    return 1 if groups is None else 1 + groups.window_blocks


def num_passed_blocks(num_computed: int, block_tokens: int, window: int | None) -> int:
    """Return how many leading blocks no query at position `num_computed` or later reads."""
    if window is None:
        return 0
    return max(num_computed + 1 - window, 0) // block_tokens


def max_live_blocks(num_new: int, block_tokens: int, window: int | None) -> int | None:
    """Return the most blocks that a step of `num_new` tokens of one request reads and writes.

    This is the worst case over all positions at which the tokens can start in a block. Return None
    if there is no window, so that the number is not limited.
    """
    if window is None:
        return None
    return (window + num_new + block_tokens - 3) // block_tokens + 1


def max_held_blocks(
    num_tokens: int,
    num_new: int,
    *,
    block_tokens: int,
    window: int | None,
    groups: KVGroups | None = None,
) -> int:
    """Return the most blocks that a request of `num_tokens` tokens needs at the same time, if its
    steps compute up to `num_new` tokens each."""
    columns = -(-num_tokens // block_tokens)
    live = max_live_blocks(num_new, block_tokens, window if groups is None else groups.window)
    held = columns if live is None else min(columns, live)
    return held if groups is None else columns + groups.window_blocks * held


def max_request_tokens(
    max_len: int,
    *,
    num_blocks: int,
    block_tokens: int,
    window: int | None,
    groups: KVGroups | None = None,
) -> int:
    """Return the length of the longest request that a cache can serve, at most `max_len` tokens.

    `num_blocks` includes the null block. If the cache holds one window and the token after it, a
    request may have any length, because its blocks are reused. With groups, this is so for the
    blocks of the layers with a window.
    """
    usable = num_blocks - 1
    if groups is not None:
        window_blocks = groups.window_blocks * max_held_blocks(
            max_len, 1, block_tokens=block_tokens, window=groups.window
        )
        columns = max(usable - window_blocks, usable // num_column_blocks(groups))
        return min(max_len, columns * block_tokens)
    live = max_live_blocks(1, block_tokens, window)
    if live is not None and usable >= live:
        return max_len
    return min(max_len, usable * block_tokens)
