"""Attention with the compiled kernels, which read keys and values in place.

In every dtype, the bits of a row's output depend neither on the other rows of the step nor on the
number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.attention.base import AttentionBatch
from worker.kernels.attention_structs import batch_struct, scoring_struct
from worker.kernels.native import NativeKernels
from worker.kernels.structs import CRows


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step's plan: the struct that describes its rows to the compiled kernels, and the window."""

    #: Owns the tensors that `rows` points at.
    batch: AttentionBatch
    rows: CRows
    window: int | None = None


class NativePagedAttention:
    is_capturable = False

    def __init__(self, kernels: NativeKernels, block_tokens: int) -> None:
        self._kernels = kernels
        self._block_tokens = block_tokens

    def plan(
        self, batch: AttentionBatch, window: int | None = None, like: Any = None
    ) -> NativePlan:
        return NativePlan(batch, batch_struct(batch, self._block_tokens), window)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: NativePlan,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scoring = scoring_struct(scale, soft_cap, plan.window, sinks, heads=q.shape[1])
        return self._kernels.attend(q, k_cache, v_cache, plan.rows, scoring)
