"""Interface of a step's operations between linears; `native.py` and `reference.py` implement it.

Legend: T tokens in the step, H query heads, H_kv key/value heads, D head dim, I intermediate.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.kv.cache import KVCache


class Kernels(Protocol):
    """Operations without state: computed in float32 or better, rounded to the tensors' dtype."""

    name: str

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add delta to x [T, hidden] in place. Return the RMS norm of x, times weight [hidden]."""
        ...

    def place(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
        layer: int,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Rotate the queries and keys of qkv [T, (H + 2 H_kv) * D] (layers/rope.py), write keys and
        values to the cache at slot_mapping [T], and return the queries [T, H, D]. May change
        qkv."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [T, I] of gate_up [T, 2 I]."""
        ...
