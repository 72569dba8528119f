"""vLLM's schema of KV events, declared here as its subscribers decode it (vLLM 0.33).

If vLLM is installed, tests use its own classes instead.
"""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import Any

import msgspec

ExternalBlockHash = bytes | int


class VllmEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class VllmBlockStored(VllmEvent, tag="BlockStored"):
    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class VllmBlockRemoved(VllmEvent, tag="BlockRemoved"):
    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


class VllmAllBlocksCleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[VllmBlockStored | VllmBlockRemoved | VllmAllBlocksCleared]
    data_parallel_rank: int | None = None


def vllm_batch() -> Any:
    """Return the class of a batch: vLLM's own if vLLM is installed, or that of this file."""
    try:
        from vllm.distributed import kv_events  # type: ignore[import-not-found]
    except ImportError:
        return VllmBatch
    return kv_events.KVEventBatch


def decode_batch(payload: bytes) -> Any:
    """Return the batch in the last frame of a message. Raises msgspec.DecodeError as a subscriber
    of vLLM would."""
    return msgspec.msgpack.decode(payload, type=vllm_batch())


def kind_of(event: Any) -> str:
    """Return the name of the event's class in vLLM."""
    return str(event.__struct_config__.tag)


class CacheMirror:
    """A router's copy of one server's prefix cache: the blocks reported and not removed.

    The blocks of each event are hashed again from its tokens, so a wrong parent, a wrong token or a
    block of another namespace raises AssertionError.

    root   hash before the first block, for each namespace that may be reported
    """

    def __init__(self, roots: list[bytes]) -> None:
        self._roots = roots
        #: Published hash -> whole content hash, of all blocks ever reported.
        self._contents: dict[int, bytes] = {}
        self.cached: set[bytes] = set()
        self.num_stored = self.num_removed = 0

    def apply(self, event: Any) -> None:
        match kind_of(event):
            case "AllBlocksCleared":
                self.cached.clear()
            case "BlockRemoved":
                removed = {self._contents[each] for each in event.block_hashes}
                assert len(removed) == len(event.block_hashes)
                assert removed <= self.cached
                self.cached -= removed
                self.num_removed += len(removed)
            case "BlockStored":
                self._store(event)
            case other:
                raise AssertionError(other)

    def _store(self, event: Any) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        first_parents = (
            self._roots
            if event.parent_block_hash is None
            else [self._contents[event.parent_block_hash]]
        )
        before = next(
            parent
            for parent in first_parents
            if external(hash_of(parent, event.token_ids[:size])) == event.block_hashes[0]
        )
        for index, published in enumerate(event.block_hashes):
            before = hash_of(before, event.token_ids[index * size : (index + 1) * size])
            assert external(before) == published
            assert before not in self.cached
            self.cached.add(before)
            self._contents[published] = before
            self.num_stored += 1


def hash_of(before: bytes, tokens: list[int]) -> bytes:
    return sha256(before + array("i", tokens).tobytes()).digest()


def external(content: bytes) -> int:
    return int.from_bytes(content, "big") % 2**64
