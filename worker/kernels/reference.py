"""The kernels in torch, for any device: the reference for the compiled kernels, and their fallback.

Legend in base.py.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm, silu

from worker.kv.cache import KVCache
from worker.layers.rope import rotate


class TorchKernels:
    name = "torch"

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            x.add_(delta)
        return rms_norm(x, weight.shape, weight, eps)

    def rotate_and_cache(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
        layer: int,
        slot_mapping: Tensor,
    ) -> Tensor:
        kv_heads = cache.k.shape[3]
        heads = qkv.view(len(qkv), -1, cache.head_dim)
        rotated = rotate(heads[:, :-kv_heads], *rotation)
        cache.write(layer, rotated[:, -kv_heads:], heads[:, -kv_heads:], slot_mapping)
        return rotated[:, :-kv_heads]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)
