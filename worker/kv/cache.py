"""Paged KV cache: keys and values in blocks, which can be read, written and zeroed.

Legend: L layers of a block, B blocks (block 0 is the null block), H_kv key/value heads, D head dim,
W items of a stored head: D, or more if heads are rounded (rounding.py), T tokens. The engine
assigns blocks to requests; the cache does not store the assignment. Which layers a block stores:
worker/spec/kv_blocks.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from worker.device.zeros import lazy_zeros
from worker.kv.rounding import ROUNDED, head_bytes, round_heads, stored_width
from worker.kv.transfer.shared_memory import SharedMemory
from worker.spec.facts import KVHeads
from worker.spec.kv_blocks import EMPTY_TOKEN_BYTES, BlockLayers, LayerPlace


class PagedCache(ABC):
    """Keys and values in blocks, initially zero. Block 0 is never written.

    block_tokens   tokens of a block
    is_rounded     whether heads are rounded to eight bits
    entries        `LayerPlace.entry` of each layer of the model
    num_entries    number of blocks in a column of a block table
    shared         the memory, if other processes can map it
    """

    block_tokens: int
    is_rounded: bool
    entries: tuple[int, ...]
    num_entries: int
    shared: SharedMemory | None

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the dtype of the stored numbers."""

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """Return the whole cache as bytes, uint8 [R, B, bytes of a piece]. A piece is the part of a
        block that lies in one of R rows."""

    @abstractmethod
    def heads(self, index: int) -> KVHeads:
        """Return the heads of one layer of the model."""

    @abstractmethod
    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer of the model, [B, block_tokens, H_kv, W] each.
        The items of a block are contiguous. If heads are latent (KVHeads), both are one tensor."""

    @abstractmethod
    def zero(self, blocks: Tensor) -> None:
        """Zero the blocks with ids [N] int64 in all layers, so that no request reads another's
        values."""

    def write(self, layer: int, k: Tensor, v: Tensor | None, slot_mapping: Tensor) -> None:
        """Store k, v [T, H_kv, D] at slot_mapping [T] int64: block * block_tokens + offset. There
        are no values if the heads are latent.

        The entries of `slot_mapping` must be distinct and outside block 0. A negative entry is
        padding: nothing is stored for it.
        """
        assert (v is None) == self.heads(layer).is_latent
        for stored, new in zip(self.layer(layer), (k, v), strict=True):
            if new is not None:
                new = round_heads(new) if self.is_rounded else new.to(stored.dtype)
                self._write(stored, new, slot_mapping)

    def _write(self, stored: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
        """Store the heads `new` of a step in one tensor of the cache."""
        is_padding = slot_mapping < 0
        # Only the CPU may look at the entries: a GPU would have to be waited for, and a captured
        # graph needs shapes that do not depend on them. So a GPU stores padding too: it writes the
        # keys and values of slot 0, which slot 0 holds already.
        if stored.device.type != "cpu" or is_padding.any():
            slot_mapping, is_padding = slot_mapping.clamp(min=0), is_padding[:, None, None]
            new = torch.where(is_padding, stored[0, :1], new)
        if stored.is_contiguous():
            stored.flatten(0, 1).index_copy_(0, slot_mapping, new)
            return
        blocks = slot_mapping.div(self.block_tokens, rounding_mode="floor")
        stored.index_put_((blocks, slot_mapping.remainder(self.block_tokens)), new)


class KVCache(PagedCache):
    """The cache of a model whose layers all have the same heads: the keys `k` and values `v`,
    [L, B, block_tokens, H_kv, W] each. Rows 0 to L - 1 are the layers' keys, the others the layers'
    values. If the heads are latent, `v` is `k`, and there are L rows."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: SharedMemory | None = None,
        *,
        places: Sequence[LayerPlace] = (),
        is_latent: bool = False,
    ) -> None:
        """Create a cache whose blocks store `num_layers` layers each.

        dtype       dtype of the stored numbers; int8: heads are rounded
        shared      new memory of `num_blocks` blocks; None: allocate memory on the device
        places      place of each layer of the model; if empty, a block stores all layers
        is_latent   whether the heads are latent (KVHeads)
        """
        width = stored_width(head_dim, dtype)
        shape = (num_layers, num_blocks, block_tokens, num_kv_heads, width)
        self.block_tokens = block_tokens
        self.head_dim = head_dim
        self.is_rounded = dtype == ROUNDED
        self.shared = shared
        self._heads = KVHeads(num_kv_heads, head_dim, is_latent)
        num_bytes = num_blocks * block_bytes(num_layers, block_tokens, self._heads, dtype)
        self._memory = _memory(num_bytes, device, shared)
        sides = self._memory.view(dtype).view(-1, *shape).unbind()
        self.k, self.v = sides[0], sides[-1]
        places = places or [LayerPlace(0, row) for row in range(num_layers)]
        keys = [self.k[place.row] for place in places]
        values = keys if is_latent else [self.v[place.row] for place in places]
        self._layers = [*zip(keys, values, strict=True)]
        self.entries = tuple(place.entry for place in places)
        self.num_entries = 1 + max(self.entries)

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def rows(self) -> Tensor:
        sides = 1 if self._heads.is_latent else 2
        return self._memory.view(sides * self.k.shape[0], self.num_blocks, -1)

    def heads(self, index: int) -> KVHeads:
        return self._heads

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]

    def zero(self, blocks: Tensor) -> None:
        self.k.index_fill_(1, blocks, 0)
        if not self._heads.is_latent:
            self.v.index_fill_(1, blocks, 0)


class MixedCache(PagedCache):
    """The cache of a model whose layers have different heads. A block is contiguous: for each of
    its layers, first the keys [block_tokens, H_kv, W] and then the values. The only row holds whole
    blocks."""

    def __init__(
        self,
        layers: BlockLayers,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: SharedMemory | None = None,
    ) -> None:
        """Create a cache. The arguments are those of KVCache."""
        self.block_tokens = block_tokens
        self.is_rounded = dtype == ROUNDED
        self.shared = shared
        self.entries = tuple(place.entry for place in layers.places)
        self.num_entries = layers.num_entries
        size = block_tokens * layers.token_bytes(lambda dim: head_bytes(dim, dtype))
        self._memory = _memory(num_blocks * size, device, shared)
        self._blocks = self._memory.view(dtype).view(num_blocks, -1)
        self._heads = layers.heads
        self._layers = [*self._views(layers)]

    def _views(self, layers: BlockLayers) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of each layer."""
        ends = [0] * layers.num_entries
        for heads, place in zip(layers.heads, layers.places, strict=True):
            shape = (self.block_tokens, heads.count, stored_width(heads.dim, self.dtype))
            size, first = math.prod(shape), ends[place.entry]
            ends[place.entry] += size if heads.is_latent else 2 * size
            sides = torch.split(self._blocks[:, first : ends[place.entry]], size, dim=1)
            k, v = (side.view(len(side), *shape) for side in (sides[0], sides[-1]))
            yield (k, k) if heads.is_latent else (k, v)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def dtype(self) -> torch.dtype:
        return self._blocks.dtype

    @property
    def rows(self) -> Tensor:
        return self._memory.view(1, self.num_blocks, -1)

    def heads(self, index: int) -> KVHeads:
        return self._heads[index]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]

    def zero(self, blocks: Tensor) -> None:
        self._blocks.index_fill_(0, blocks, 0)


class EmptyCache(PagedCache):
    """The cache of a model without attention. Its blocks store no keys and values, only bytes that
    stay zero (worker/spec/kv_blocks.py)."""

    is_rounded = False
    entries = ()
    num_entries = 1

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        device: torch.device,
        shared: SharedMemory | None = None,
    ) -> None:
        """Create a cache. The arguments are those of KVCache."""
        self.block_tokens = block_tokens
        self.shared = shared
        size = block_tokens * EMPTY_TOKEN_BYTES
        self._blocks = _memory(num_blocks * size, device, shared).view(num_blocks, size)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def dtype(self) -> torch.dtype:
        return self._blocks.dtype

    @property
    def rows(self) -> Tensor:
        return self._blocks[None]

    def heads(self, index: int) -> KVHeads:
        raise IndexError("no layer has attention")

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        raise IndexError("no layer has attention")

    def zero(self, blocks: Tensor) -> None:
        """Do nothing: no step writes to the blocks."""


def make_cache(
    layers: BlockLayers,
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    shared: SharedMemory | None = None,
) -> PagedCache:
    """Return a new cache for these layers. The other arguments are those of KVCache."""
    if layers.is_empty:
        return EmptyCache(num_blocks, block_tokens, device, shared)
    if not layers.is_uniform:
        return MixedCache(layers, num_blocks, block_tokens, dtype, device, shared)
    return KVCache(
        layers.num_rows,
        num_blocks,
        block_tokens,
        layers.heads[0].count,
        layers.heads[0].dim,
        dtype,
        device,
        shared,
        places=layers.places,
        is_latent=layers.heads[0].is_latent,
    )


def cache_bytes(layers: BlockLayers, num_blocks: int, block_tokens: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of the cache that `make_cache` returns."""
    return num_blocks * block_tokens * layers.token_bytes(lambda dim: head_bytes(dim, dtype))


def _memory(num_bytes: int, device: torch.device, shared: SharedMemory | None) -> Tensor:
    """Return the memory of a cache, [num_bytes] uint8."""
    if shared is None:
        return lazy_zeros((num_bytes,), torch.uint8, device)
    return torch.from_numpy(shared.content)


class CountedBlocks(KVCache):
    """Stands in for the cache of a model whose class keeps one by itself. The engine assigns its
    blocks to requests, which bounds the tokens of all requests together; they store nothing."""

    def __init__(self, block_tokens: int, device: torch.device) -> None:
        super().__init__(1, 1, block_tokens, 1, 1, torch.float32, device)

    def zero(self, blocks: Tensor) -> None:
        """Do nothing: there is nothing to read in the blocks."""


def block_bytes(num_layers: int, block_tokens: int, heads: KVHeads, dtype: torch.dtype) -> int:
    """Return the size in bytes of one block that stores `num_layers` layers with these heads."""
    return num_layers * block_tokens * heads.num_stored * head_bytes(heads.dim, dtype)
