"""Collects the KV events of an engine: blocks that enter and leave the prefix cache.

Only blocks of the namespaces that were named are reported, because the events contain token ids. A
removal is reported only for a block that was reported before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

from engine_core.requests.request import Request
from protocol.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    external_hash,
)


class CacheEvents:
    """The events since the last `drain`, in order.

    namespaces     namespaces of the prefix cache whose blocks are reported
    block_tokens   tokens per block
    """

    def __init__(self, namespaces: Collection[str], block_tokens: int) -> None:
        self._namespaces = frozenset(namespaces)
        self._block_tokens = block_tokens
        #: Content hashes of the blocks that were reported as stored, and not as removed since.
        self._reported: set[bytes] = set()
        self._events: list[KVEvent] = [AllBlocksCleared()]
        #: Hashes of blocks that were removed after the last of `_events`.
        self._removed: list[int] = []

    def on_published(self, request: Request, indexes: Sequence[int]) -> None:
        """Report that blocks of `request` have entered the cache. `indexes` are their places in its
        block table, in ascending order."""
        if not indexes or request.namespace not in self._namespaces:
            return
        self._flush_removed()
        places = enumerate(indexes)
        for _, run in groupby(places, key=lambda place: place[1] - place[0]):
            self._add_run(request, [index for _, index in run])

    def _add_run(self, request: Request, indexes: Sequence[int]) -> None:
        """Report blocks with consecutive `indexes`."""
        first, end = indexes[0], indexes[-1] + 1
        size, hashes = self._block_tokens, request.hashes[first:end]
        parent = external_hash(request.hashes[first - 1]) if first else None
        self._reported.update(hashes)
        self._events.append(
            BlockStored(
                block_hashes=list(map(external_hash, hashes)),
                parent_block_hash=parent,
                token_ids=request.tokens[first * size : end * size].tolist(),
                block_size=size,
                lora_name=request.adapter.name if request.adapter is not None else None,
            )
        )

    def on_removed(self, content: bytes) -> None:
        """Report that the block with this content hash has left the cache."""
        if content in self._reported:
            self._reported.remove(content)
            self._removed.append(external_hash(content))

    def drain(self) -> list[KVEvent]:
        """Return the events since the last call."""
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(block_hashes=self._removed))
            self._removed = []
