"""Interface of a step's operations between linears; `native.py` and `reference.py` implement it.

Legend: T tokens in the step, H query heads, H_kv key/value heads, D head dim, I intermediate.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.kv.cache import KVCache


class Kernels(Protocol):
    """Stateless. Numbers are computed in float32 or better and rounded to the tensors' dtype."""

    name: str

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [T, hidden] += delta, in place; then its RMS norm, times weight [hidden]."""
        ...

    def place(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
        layer: int,
        slot_mapping: Tensor,
    ) -> Tensor:
        """qkv [T, (H + 2 H_kv) * D]: queries and keys turned (layers/rope.py), keys and values
        written to the cache at slot_mapping [T] -> queries [T, H, D]. May change qkv."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(gate) * up [T, I]."""
        ...
