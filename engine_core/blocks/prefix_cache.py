"""Prefix cache: finds a block by the hash of its content.

A block is published after the step that filled it has committed. It can be found while it is held
and while it is in the pool's free list. It is removed when the pool allocates it for new content.
The cache does not hold its blocks, so it does not keep them from being reused.

For each block, the cache also records whether the draft model's K/V exists for it. If not, a
request that uses the draft model finds the block, but its draft model must compute it. The draft
model is not used for every request (speculation/draft_policy.py).

If the model has a recurrent state, a prefix is found only up to its last checkpoint
(checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile

from engine_core.blocks.cache_events import CacheEvents
from engine_core.blocks.checkpoints import CheckpointPool
from engine_core.blocks.hash import ContentHashes
from engine_core.requests.request import Request
from protocol.engine.kv_window import num_passed_blocks
from protocol.engine.messages import Limits
from protocol.worker.steps import NULL_BLOCK


def window_keys(content: bytes, window_blocks: int) -> list[bytes]:
    """Return the keys of a column's blocks that store the layers with a window.

    `content` is the column's hash, which is the key of its first block.
    """
    return [content + bytes([index]) for index in range(window_blocks)]


class PrefixCache:
    """A one-to-one mapping between content hashes and blocks of the pool.

    events        collects what enters and leaves the cache; None if nothing is reported
    checkpoints   of the states after some of the blocks; None if the model has no state
    """

    def __init__(
        self, events: CacheEvents | None = None, checkpoints: CheckpointPool | None = None
    ) -> None:
        self.events = events
        self.checkpoints = checkpoints
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._draft_computed: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    def publish(self, content: bytes, block: int, *, is_draft_computed: bool) -> bool:
        """Make `block` findable by its content hash, unless another block with this content is in
        the cache. Return whether the content was not in the cache before.

        `is_draft_computed` is whether the draft model's K/V for the block exists too.
        """
        is_new = content not in self._block_of and block not in self._hash_of
        if is_new:
            self._block_of[content] = block
            self._hash_of[block] = content
        if is_draft_computed and block in self._hash_of:
            self._draft_computed.add(block)
        return is_new

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`."""
        found: list[int] = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def match_window(self, hashes: Sequence[bytes], num_passed: Callable[[int], int]) -> list[int]:
        """Return the blocks of the longest prefix of `hashes` whose needed blocks are all cached.

        `num_passed(n)` is the number of leading blocks that the window has passed after n blocks.
        They are not needed, and are the null block in the result. The hash of each later block
        covers their tokens too.

        Each prefix is searched from its first needed block on. A missing block rules out every
        longer prefix that needs it, so if nothing is cached, there is one look-up per window. No
        hash is checked more than twice.
        """
        block_of = self._block_of
        end = _window_end(len(hashes), num_passed, lambda index: hashes[index] in block_of)
        first = num_passed(end) if end else 0
        return [NULL_BLOCK] * first + [block_of[content] for content in hashes[first:end]]

    def match_groups(
        self, hashes: Sequence[bytes], num_passed: Callable[[int], int], window_blocks: int
    ) -> tuple[list[int], int]:
        """Return the first block of each column of the longest cached prefix of `hashes`, and the
        number of columns whose first block is cached.

        A prefix is cached if the first block of every column is cached and, for each column that
        the window has not passed, its other blocks are cached too. `num_passed` is as in
        `match_window`.
        """

        def is_cached(index: int) -> bool:
            keys = window_keys(hashes[index], window_blocks)
            return all(key in self._block_of for key in keys)

        found = self.match(hashes)
        return found[: _window_end(len(found), num_passed, is_cached)], len(found)

    def window_columns(self, hashes: Sequence[bytes], window_blocks: int) -> list[list[int]]:
        """Return, for each column, the blocks of the layers with a window. They must be cached."""
        return [
            [self._block_of[key] for key in window_keys(content, window_blocks)]
            for content in hashes
        ]

    def num_draft_computed(self, found: Sequence[int]) -> int:
        """Return how many leading blocks of `found` have the draft model's K/V."""
        return sum(1 for _ in takewhile(self._draft_computed.__contains__, found))

    def remove(self, block: int) -> None:
        """Remove `block`, which is about to be overwritten."""
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
            self._draft_computed.discard(block)
            if self.events is not None:
                self.events.on_removed(content)
            if self.checkpoints is not None:
                self.checkpoints.remove(content)

    def find(self, content: bytes) -> int | None:
        """Return the block with this content; None if there is none."""
        return self._block_of.get(content)

    def move(self, content: bytes, block: int, *, is_draft_computed: bool) -> None:
        """Let `block` take the place of the cached block with this content."""
        old = self._block_of[content]
        del self._hash_of[old]
        self._draft_computed.discard(old)
        self._block_of[content], self._hash_of[block] = block, content
        if is_draft_computed:
            self._draft_computed.add(block)

    def items(self) -> dict[int, bytes]:
        """Return a copy of the mapping from block to hash, for checks."""
        return dict(self._hash_of)


def _window_end(
    end: int, num_passed: Callable[[int], int], is_cached: Callable[[int], bool]
) -> int:
    """Return the length of the longest prefix, at most `end`, whose needed blocks are cached."""
    while end:
        missing = next((i for i in range(num_passed(end), end) if not is_cached(i)), None)
        if missing is None:
            return end
        end = missing
    return 0


class Prefixes:
    """Finds cached blocks for requests, and publishes the blocks that requests have filled."""

    def __init__(self, limits: Limits, hashes: ContentHashes, cache: PrefixCache) -> None:
        self.hashes = hashes
        self._is_enabled = limits.prefix_cache
        self._block_tokens = limits.block_tokens
        groups = limits.kv_groups
        self._window = limits.kv_window if groups is None else groups.window
        self._window_blocks = 0 if groups is None else groups.window_blocks
        self._cache = cache

    def find(self, request: Request) -> list[int]:
        """Return the cached blocks that hold the first tokens of the request.

        - If all layers have a window, blocks that it has passed after these tokens are replaced by
          the null block. With K/V groups, only the blocks of the layers without a window are
          returned.
        - Blocks of a run that is computed as a whole are used only together with the end of the
          run.
        - The block with the last token is not used, because the step needs the logits of this
          token.
        - A request with prompt logprobs uses no cached blocks, because it needs the logits of its
          whole prompt.
        """
        if not self._is_enabled or request.params.prompt_logprobs is not None:
            return []
        usable = (len(request.tokens) - 1) // self._block_tokens
        self._extend(request, usable)
        hashes = request.hashes[:usable]
        found, num_columns = self._match(hashes)
        checkpoints = self._cache.checkpoints
        if checkpoints is not None:
            request.num_shared_columns = 0
        while (end := self._resumable(request, hashes, len(found))) < len(found):
            found, _ = self._match(hashes[:end])
        num_columns = self._outside_runs(request, num_columns)
        if len(found) < num_columns:
            request.num_shared_columns = num_columns
        return found

    def _resumable(self, request: Request, hashes: Sequence[bytes], num_found: int) -> int:
        """Return how many of the first `num_found` blocks a request can continue after: a
        checkpoint follows them if the model has a state, and they end outside of whole runs."""
        num_outside = self._outside_runs(request, num_found)
        checkpoints = self._cache.checkpoints
        return num_outside if checkpoints is None else checkpoints.num_covered(hashes, num_outside)

    def _outside_runs(self, request: Request, num_blocks: int) -> int:
        """Return `num_blocks`, or fewer if the last of them ends inside a run that is computed as a
        whole."""
        size = self._block_tokens
        while (end := request.last_end(num_blocks * size)) < num_blocks * size:
            num_blocks = end // size
        return num_blocks

    def _match(self, hashes: Sequence[bytes]) -> tuple[list[int], int]:
        """Return the blocks of the longest cached prefix of `hashes`, as `find` does, and the
        number of leading columns that other prompts have in common with `hashes`."""
        if self._window_blocks:
            return self._cache.match_groups(hashes, self._num_passed, self._window_blocks)
        if self._window is None:
            found = self._cache.match(hashes)
        else:
            found = self._cache.match_window(hashes, self._num_passed)
        return found, len(found)

    def publish(self, request: Request, num_full: int | None = None) -> range:
        """Publish the blocks that were filled since the last call for this request. Return their
        indexes in the request's block table.

        `num_full` is the number of leading blocks that may be published; None: those that all
        models have computed.
        """
        full = request.num_shareable // self._block_tokens if num_full is None else num_full
        published = range(request.num_published, full) if self._is_enabled else range(0)
        if published:
            self._extend(request, full)
            events, new = self._cache.events, []
            num_drafted = 0
            if request.uses_draft_model:
                num_drafted = request.num_draft_computed // self._block_tokens
            for index in published:
                is_new = self._cache.publish(
                    request.hashes[index],
                    request.blocks[index],
                    is_draft_computed=index < num_drafted,
                )
                if is_new and events is not None:
                    new.append(index)
            if events is not None:
                events.on_published(request, new)
            if self._window_blocks:
                self._publish_window(request, published)
            request.num_published = full
        return published

    def publish_all(self, request: Request) -> range:
        """Publish all blocks that the request has computed, before it releases them. Return their
        indexes in the request's block table.

        Unlike `publish`, this includes blocks that the draft model has not computed. And if a block
        was published while another one with its content was cached, and that one is gone, the block
        is published again.
        """
        full = request.num_computed // self._block_tokens
        request.num_published = 0 if request.window_tables else request.num_passed
        self._extend(request, full)
        return self.publish(request, full)

    def entries(self, request: Request, indexes: Iterable[int]) -> Iterator[tuple[int, bytes, int]]:
        """Yield (index, key, block) for each block at `indexes` of the request's block table that
        the window has not passed."""
        for index in indexes:
            content = request.hashes[index]
            yield index, content, request.blocks[index]
            if index >= request.num_passed:
                keys = window_keys(content, len(request.window_tables))
                for key, table in zip(keys, request.window_tables, strict=True):
                    yield index, key, table[index]

    def _publish_window(self, request: Request, published: range) -> None:
        """Publish the blocks at the indexes `published` of the layers with a window, except blocks
        that the window has passed."""
        for index in range(max(published.start, request.num_passed), published.stop):
            keys = window_keys(request.hashes[index], self._window_blocks)
            for key, table in zip(keys, request.window_tables, strict=True):
                self._cache.publish(key, table[index], is_draft_computed=False)

    def _num_passed(self, num_blocks: int) -> int:
        return num_passed_blocks(num_blocks * self._block_tokens, self._block_tokens, self._window)

    def _extend(self, request: Request, num_blocks: int) -> None:
        self.hashes.extend(
            request.hashes,
            request.namespace,
            request.tokens,
            num_blocks,
            request.adapter_digest,
            request.images,
        )
