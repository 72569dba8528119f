"""Layout of a KV cache. Blocks and states can be exchanged only between caches with equal layouts.

Blocks on disk may be older than the compiled kernels. So their digest also covers
`ModelCard.numerics`: a block that is loaded has the bits that would be computed now.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Self

import msgspec

from protocol.engine.model_card import ModelCard
from worker.kv.cache import PagedCache
from worker.spec.facts import KVHeads

DIGEST_BYTES = 16


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Properties that must be equal in two caches that exchange blocks: the model's digest, the
    dtype and the shape, and the size of a recurrent state. The numbers of blocks and checkpoints
    may differ. The heads are those of the first layer: the digest covers those of the others. They
    are 0 if no layer has attention."""

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    #: Bytes of a request's recurrent state; 0: the model has none.
    state_bytes: int = 0

    def stored_digest(self, numerics: str) -> bytes:
        """Return the digest for blocks that are stored on disk. `numerics` is
        `ModelCard.numerics`."""
        if not numerics:
            return self.digest
        return blake2b(self.digest + numerics.encode(), digest_size=DIGEST_BYTES).digest()

    def state_digest(self, numerics: str) -> bytes:
        """Return the digest for states that are stored on disk. It differs from that of blocks, so
        that no file of a state is read as a block."""
        return blake2b(self.stored_digest(numerics) + b"state", digest_size=DIGEST_BYTES).digest()

    @classmethod
    def from_cache(cls, card: ModelCard, cache: PagedCache, state_bytes: int = 0) -> Self:
        first = cache.heads(0) if cache.entries else KVHeads(0, 0)
        return cls(
            model=card.digest,
            dtype=str(cache.dtype).removeprefix("torch."),
            num_layers=len(cache.entries),
            num_kv_heads=first.count,
            head_dim=first.dim,
            block_tokens=cache.block_tokens,
            state_bytes=state_bytes,
        )

    @property
    def digest(self) -> bytes:
        """Return a digest of the layout. Different layouts have different digests."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=DIGEST_BYTES).digest()

    @property
    def description(self) -> str:
        """Return the layout as text for error messages."""
        state = f", states of {self.state_bytes:,} bytes" if self.state_bytes else ""
        kv = (
            f"K/V in {self.dtype}, {self.num_layers} layers of {self.num_kv_heads} heads of "
            f"{self.head_dim}"
        )
        return (
            f"model {self.model[:12]}, {kv if self.num_layers else 'no K/V'}, "
            f"{self.block_tokens} tokens a block{state}"
        )
