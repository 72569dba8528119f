"""Attention over the paged cache with a FlashAttention library: one call for each layer.

The library is a function with the arguments of `flash_attn_varlen_func`. flash_library.py finds and
loads it. The function reads the step's tables from the GPU's memory. So planning a step uploads
nothing, and no call waits for the GPU.

Legend: as in base.py.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from worker.attention.base import AttentionBatch

ALL_KEYS = (-1, -1)
"""`window_size` of a layer without a window."""


class FlashArguments(TypedDict):
    """The named arguments of a causal paged call of `flash_attn_varlen_func`."""

    #: At least the most queries of a row.
    max_seqlen_q: int
    #: [R + 1] int32: first query of each row, then the number of all queries.
    cu_seqlens_q: Tensor
    #: At least the longest context of a row.
    max_seqlen_k: int
    #: [R] int32: context of each row. Its queries are the last tokens of the context.
    seqused_k: Tensor
    #: [R, M] int32
    block_table: Tensor
    softmax_scale: float
    #: True: query i of n sees seqused_k - n + i + 1 keys.
    causal: bool
    #: Number of keys seen before and after a query's own key; -1: all.
    window_size: tuple[int, int]
    #: 0: none.
    softcap: float
    #: [H] bfloat16: sinks.
    s_aux: Tensor | None


class FlashFunction(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, **arguments: Unpack[FlashArguments]
    ) -> Tensor:
        """Return the attention [T, H, D] of q [T, H, D] to the caches k and v
        [B, page, H_kv, D]. All are bfloat16 or float16."""
        ...


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """The tables of a step and their largest entries."""

    #: [R + 1] int32
    row_starts: Tensor
    #: [R] int32
    context_lens: Tensor
    #: [R, M] int32
    block_table: Tensor
    #: Most queries of a row, and the longest context.
    max_queries: int
    max_context: int
    window_size: tuple[int, int]


class FlashPagedAttention:
    """Attention with the function of a FlashAttention library."""

    is_capturable = True

    def __init__(self, attend: FlashFunction) -> None:
        self._attend = attend
        #: Sinks of a layer -> the same in the dtype that the library reads. They are weights, so
        #: each is converted once rather than in each step.
        self._sinks: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def plan(
        self, batch: AttentionBatch, window: int | None = None, like: FlashPlan | None = None
    ) -> FlashPlan:
        assert batch.seen_ends is None, "images are computed on CPUs only"
        if like is not None:
            return replace(like, block_table=batch.block_table)
        if batch.device_row_starts is None or batch.device_context_lens is None:
            raise ValueError("the batch does not have its tables in the GPU's memory")
        has_prefills = batch.num_decodes < len(batch.context_lens)
        return FlashPlan(
            row_starts=batch.device_row_starts,
            context_lens=batch.device_context_lens,
            block_table=batch.block_table,
            max_queries=int(batch.row_starts.diff().max()) if has_prefills else 1,
            max_context=int(batch.context_lens.max()),
            window_size=ALL_KEYS if window is None else (window - 1, 0),
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: FlashPlan,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._attend(
            q,
            k_cache,
            v_cache,
            max_seqlen_q=plan.max_queries,
            cu_seqlens_q=plan.row_starts,
            max_seqlen_k=plan.max_context,
            seqused_k=plan.context_lens,
            block_table=plan.block_table,
            softmax_scale=q.shape[-1] ** -0.5 if scale is None else scale,
            causal=True,
            window_size=plan.window_size,
            softcap=0.0 if soft_cap is None else soft_cap,
            s_aux=None if sinks is None else self._in_library_dtype(sinks),
        )

    def _in_library_dtype(self, sinks: Tensor) -> Tensor:
        """Return sinks [H] float32 in bfloat16, the dtype of the checkpoints that have them."""
        if sinks not in self._sinks:
            self._sinks[sinks] = sinks.to(torch.bfloat16)
        return self._sinks[sinks]
