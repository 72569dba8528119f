"""The paged KV cache: where keys and values live, and the only three things done to them.

Legend: L layers, B blocks (block 0 is the null block), H_kv key/value heads, D head dim, T tokens.
Which block belongs to whom is the engine's business; nothing here remembers it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.kv.transfer.shared_memory import SharedMemory


class KVCache:
    """k, v [L, B, block_tokens, H_kv, D], zero at first. Block 0 is never written and stays so."""

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
        """shared: fresh, of all blocks' `block_bytes`; None: memory of its own, on the device."""
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
        """All of it as bytes, uint8 [2L, B, bytes of a piece]: each layer's keys, then each layer's
        values. What of a block is in one row is a piece."""
        return self._memory.view(2 * self.k.shape[0], self.num_blocks, -1)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [B, block_tokens, H_kv, D] each."""
        return self.k[index], self.v[index]

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v [T, H_kv, D] at slot_mapping [T] int64: block * block_tokens + offset.

        Slots must be distinct and outside block 0.
        """
        self._flat_k[layer].index_copy_(0, slot_mapping, k)
        self._flat_v[layer].index_copy_(0, slot_mapping, v)

    def zero(self, blocks: Tensor) -> None:
        """Fill blocks [N] int64 with zeros in every layer: nobody may read what an owner left."""
        self.k.index_fill_(1, blocks, 0)
        self.v.index_fill_(1, blocks, 0)


def block_bytes(
    num_layers: int, block_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Memory of one block: its keys and values in all layers."""
    return 2 * num_layers * block_tokens * num_kv_heads * head_dim * dtype.itemsize


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """uint8. On the CPU, pages that the system zeroes on first touch: what is not used costs
    nothing. torch.zeros writes every page at once (seconds, and the whole size resident).
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))
