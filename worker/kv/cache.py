"""Paged KV cache: keys and values in blocks, which can be read, written and zeroed.

Legend: L layers of a block, B blocks (block 0 is the null block), H_kv key/value heads, D head dim,
W items of a stored head: D, or more if heads are rounded (rounding.py), T tokens. The engine
assigns blocks to requests; the cache does not store the assignment. Usually a block stores all
layers of the model. If only some layers have a window, each column of a block table has several
blocks, which store different layers (KVGroups in protocol/engine/kv_window.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.device.zeros import lazy_zeros
from worker.kv.rounding import ROUNDED, head_bytes, round_heads, stored_width
from worker.kv.transfer.shared_memory import SharedMemory


class LayerPlace(NamedTuple):
    """The place of a layer's keys and values.

    entry   which block of a column stores the layer, counted from 0
    row     index of the layer among the layers of that block
    """

    entry: int
    row: int


def layer_places(windows: Sequence[int | None]) -> list[LayerPlace]:
    """Return the place of each layer of a model, some of whose layers have a window.

    windows   the window of each layer; None if the layer sees all tokens

    The layers without a window are stored in the first block of a column. The layers with a window
    follow in order. Each of their blocks stores at most as many layers as the first one.
    """
    size = windows.count(None)
    places, num_full, num_windowed = [], 0, 0
    for window in windows:
        if window is None:
            places.append(LayerPlace(0, num_full))
            num_full += 1
        else:
            places.append(LayerPlace(1 + num_windowed // size, num_windowed % size))
            num_windowed += 1
    return places


class KVCache:
    """The keys `k` and values `v`, [L, B, block_tokens, H_kv, W] each, initially zero. Block 0 is
    never written."""

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
    ) -> None:
        """Create a cache whose blocks store `num_layers` layers each.

        dtype    dtype of the stored numbers; int8: heads are rounded
        shared   new memory of `num_blocks` blocks; None: allocate memory on the device
        places   place of each layer of the model; if empty, a block stores all layers
        """
        width = stored_width(head_dim, dtype)
        shape = (num_layers, num_blocks, block_tokens, num_kv_heads, width)
        self.block_tokens = block_tokens
        self.head_dim = head_dim
        #: Whether heads are rounded to eight bits.
        self.is_rounded = dtype == ROUNDED
        self.shared = shared
        if shared is None:
            num_bytes = num_blocks * block_bytes(
                num_layers, block_tokens, num_kv_heads, head_dim, dtype
            )
            self._memory = lazy_zeros((num_bytes,), torch.uint8, device)
        else:
            self._memory = torch.from_numpy(shared.content)
        self.k, self.v = self._memory.view(dtype).view(2, *shape).unbind()
        flat = (num_layers, num_blocks * block_tokens, num_kv_heads, width)
        places = places or [LayerPlace(0, row) for row in range(num_layers)]
        self._rows = [place.row for place in places]
        self._flat_k = [self.k.view(flat)[row] for row in self._rows]
        self._flat_v = [self.v.view(flat)[row] for row in self._rows]
        #: `LayerPlace.entry` of each layer of the model.
        self.entries = tuple(place.entry for place in places)
        #: Number of blocks in a column of a block table.
        self.num_entries = 1 + max(self.entries)

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def rows(self) -> Tensor:
        """Return the whole cache as bytes, uint8 [2L, B, bytes of a piece]. The first L rows are
        the layers' keys, the others the layers' values. A piece is the part of a block that lies in
        one row."""
        return self._memory.view(2 * self.k.shape[0], self.num_blocks, -1)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer of the model, [B, block_tokens, H_kv, W] each."""
        row = self._rows[index]
        return self.k[row], self.v[row]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, H_kv, D] at slot_mapping [T] int64: block * block_tokens + offset.

        The entries of `slot_mapping` must be distinct and outside block 0. A negative entry is
        padding: nothing is stored for it.
        """
        if self.is_rounded:
            k, v = round_heads(k), round_heads(v)
        is_padding = slot_mapping < 0
        # Only the CPU may look at the entries: a GPU would have to be waited for, and a captured
        # graph needs shapes that do not depend on them. So a GPU stores padding too: it writes the
        # keys and values of slot 0, which slot 0 holds already.
        if self.k.device.type != "cpu" or is_padding.any():
            slot_mapping, is_padding = slot_mapping.clamp(min=0), is_padding[:, None, None]
            k = torch.where(is_padding, self._flat_k[layer][:1], k)
            v = torch.where(is_padding, self._flat_v[layer][:1], v)
        self._flat_k[layer].index_copy_(0, slot_mapping, k)
        self._flat_v[layer].index_copy_(0, slot_mapping, v)

    def zero(self, blocks: Tensor) -> None:
        """Zero the blocks with ids [N] int64 in all layers, so that no request reads another's
        values."""
        self.k.index_fill_(1, blocks, 0)
        self.v.index_fill_(1, blocks, 0)


class CountedBlocks(KVCache):
    """Stands in for the cache of a model whose class keeps one by itself. The engine assigns its
    blocks to requests, which bounds the tokens of all requests together; they store nothing."""

    def __init__(self, block_tokens: int, device: torch.device) -> None:
        super().__init__(1, 1, block_tokens, 1, 1, torch.float32, device)

    def zero(self, blocks: Tensor) -> None:
        """Do nothing: there is nothing to read in the blocks."""


def block_bytes(
    num_layers: int, block_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the size in bytes of one block that stores `num_layers` layers."""
    return 2 * num_layers * block_tokens * num_kv_heads * head_bytes(head_dim, dtype)
