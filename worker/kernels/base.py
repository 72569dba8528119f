"""The interface of the operations between the linear layers of a forward pass.

`native.py` implements it with compiled kernels, and `reference.py` with torch.

Legend: T tokens in the step, H query heads, H_kv key/value heads, D head dim, I intermediate.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.kv.cache import KVCache


class Kernels(Protocol):
    """The operations between the linear layers of a forward pass. They hold no state.

    Sums are computed in float32 or better, and results are rounded to the tensors' dtype.
    """

    #: Name in logs and options.
    name: str

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta`, unless it is None, to x in place. Return the RMS norm of x times `weight`.

        x, delta, returns   [T, hidden]
        weight              [hidden]
        """
        ...

    def rotate_and_cache(
        self,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KVCache,
        layer: int,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to the cache, and return the queries.

        qkv            [T, (H + 2 H_kv) * D]; may be overwritten
        rotation       cos and sin, [T, 1, D] each, from `rotation` of layers/rope.py
        layer          index of the layer in `cache`, which gets the keys and values
        slot_mapping   [T] int64, see AttentionBatch
        returns        [T, H, D]
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [T, I]. The columns of gate_up [T, 2 I] are gate, then up."""
        ...
