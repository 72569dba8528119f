"""Paged KV cache: keys and values in blocks, which can be read, written and zeroed.

Legend: L layers, B blocks (block 0 is the null block), H_kv key/value heads, D head dim, T tokens.
The engine assigns blocks to requests; the cache does not store the assignment.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.kv.transfer.shared_memory import SharedMemory


class KVCache:
    """The keys `k` and values `v`, [L, B, block_tokens, H_kv, D] each, initially zero. Block 0 is
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
    ) -> None:
        """Use `shared`, which is new memory of `num_blocks` blocks; if it is None, allocate memory
        on the device."""
        shape = (num_layers, num_blocks, block_tokens, num_kv_heads, head_dim)
        self.block_tokens = block_tokens
        self.shared = shared
        if shared is None:
            num_bytes = num_blocks * block_bytes(*shape[:1], *shape[2:], dtype)
            self._memory = _zeros(num_bytes, device)
        else:
            self._memory = torch.from_numpy(shared.content)
        self.k, self.v = self._memory.view(dtype).view(2, *shape).unbind()
        flat = (num_layers, num_blocks * block_tokens, num_kv_heads, head_dim)
        self._flat_k = list(self.k.view(flat).unbind())
        self._flat_v = list(self.v.view(flat).unbind())

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
        """Return the keys and values of one layer, [B, block_tokens, H_kv, D] each."""
        return self.k[index], self.v[index]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, H_kv, D] at slot_mapping [T] int64: block * block_tokens + offset.

        Entries must be distinct and outside block 0.
        """
        self._flat_k[layer].index_copy_(0, slot_mapping, k)
        self._flat_v[layer].index_copy_(0, slot_mapping, v)

    def zero(self, blocks: Tensor) -> None:
        """Zero blocks [N] int64 in every layer, so that no request reads another's values."""
        self.k.index_fill_(1, blocks, 0)
        self.v.index_fill_(1, blocks, 0)


def block_bytes(
    num_layers: int, block_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Return the size of one block in bytes: its keys and values in all layers."""
    return 2 * num_layers * block_tokens * num_kv_heads * head_dim * dtype.itemsize


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeroed memory, uint8 [num_bytes]. On the CPU the system zeroes a page when it is first
    touched, so unused pages cost nothing. torch.zeros would write every page at once, which takes
    seconds and makes the whole size resident."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))
