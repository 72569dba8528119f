"""Layout of a KV cache. Blocks can be exchanged only between caches with equal layouts.

Blocks on disk may be older than the compiled kernels. So their digest also covers
`ModelCard.numerics`: a block that is loaded has the bits that would be computed now.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Self

import msgspec

from protocol.engine.model_card import ModelCard
from worker.kv.cache import PagedCache

DIGEST_BYTES = 16


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that must be equal in two caches that exchange blocks: the model's digest, the
    dtype and the shape. The number of blocks may differ. The heads are those of the first layer:
    the digest covers those of the others."""

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int

    def stored_digest(self, numerics: str) -> bytes:
        """Return the digest for blocks that are stored on disk. `numerics` is
        `ModelCard.numerics`."""
        if not numerics:
            return self.digest
        return blake2b(self.digest + numerics.encode(), digest_size=DIGEST_BYTES).digest()

    @classmethod
    def from_cache(cls, card: ModelCard, cache: PagedCache) -> Self:
        first = cache.heads(0)
        return cls(
            model=card.digest,
            dtype=str(cache.dtype).removeprefix("torch."),
            num_layers=len(cache.entries),
            num_kv_heads=first.count,
            head_dim=first.dim,
            block_tokens=cache.block_tokens,
        )

    @property
    def digest(self) -> bytes:
        """Return a digest of the layout. Different layouts have different digests."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=DIGEST_BYTES).digest()

    @property
    def description(self) -> str:
        """Return the layout as text for error messages."""
        return (
            f"model {self.model[:12]}, K/V in {self.dtype}, {self.num_layers} layers of "
            f"{self.num_kv_heads} heads of {self.head_dim}, {self.block_tokens} tokens a block"
        )
