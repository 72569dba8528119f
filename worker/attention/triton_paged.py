"""Attention over the paged cache on GPUs, with the Triton kernels of worker/kernels/triton.

A step is planned from numbers on the host: the longest query, the longest context and the number of
rows of each kind. The rows themselves are described in the GPU's memory. So neither the plan nor a
layer waits for the GPU, and a captured graph can be replayed with other rows, if their numbers do
not exceed those of the step that was captured.

A layer needs one launch for rows of one token and one for all other rows, and another one for each
of them if its keys are split among several programs. The bits of a row's output depend on the
number of splits, and so on the other rows. The two kinds are split by different numbers, and each
has memory for its own: a few decodes have many splits, which the tokens of a long chunk do not.

Legend as in base.py, and G = H / H_kv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import e, log2
from typing import Any, Self

import torch
from torch import Tensor

from worker.attention.base import AttentionBatch
from worker.attention.triton_tiles import (
    DECODE_SPLITS,
    MAX_SPLITS,
    PREFILL_SPLITS,
    TileShape,
    decode_tile,
    num_splits,
    padded_dim,
    prefill_tile,
)
from worker.kernels.triton import attention as kernels

LOG2_E = log2(e)
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of caches that the kernels read. Queries have the same dtype."""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    #: [R + 1], [R] and [R, M] int32 on the GPU.
    row_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    num_decodes: int
    #: Most tokens in a row, of the rows that are no decodes; 0 if there are none.
    longest_query: int
    #: Most keys that a token of a row of one token sees, and of any other row.
    decode_keys: int
    prefill_keys: int
    window: int | None


class TritonPagedAttention:
    """Attention over the paged cache with our own Triton kernels.

    block_tokens     tokens in a block of the cache; a power of two
    num_processors   streaming multiprocessors of the GPU
    """

    is_capturable = True

    def __init__(self, block_tokens: int, *, num_processors: int) -> None:
        self._block_tokens = block_tokens
        self._num_processors = num_processors

    def plan(
        self, batch: AttentionBatch, window: int | None = None, like: TritonPlan | None = None
    ) -> TritonPlan:
        assert batch.seen_ends is None, "images are computed on CPUs only"
        if like is not None:
            return replace(like, block_table=batch.block_table)
        assert batch.device_row_starts is not None
        assert batch.device_context_lens is not None
        num_decodes = batch.num_decodes
        counts = batch.row_starts[num_decodes:].diff()
        seen = batch.context_lens if window is None else batch.context_lens.clamp(max=window)
        return TritonPlan(
            row_starts=batch.device_row_starts,
            context_lens=batch.device_context_lens,
            block_table=batch.block_table,
            num_decodes=num_decodes,
            longest_query=_largest(counts),
            decode_keys=_largest(seen[:num_decodes]),
            prefill_keys=_largest(seen[num_decodes:]),
            window=window,
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: TritonPlan,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _check(q, k_cache, v_cache, block_tokens=self._block_tokens)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_tokens, num_heads, head_dim = q.shape
        num_decodes, kv_heads = plan.num_decodes, k_cache.shape[2]
        group = num_heads // kv_heads
        prefill = prefill_tile(group, head_dim, q.dtype.itemsize)
        num_tiles = _num_tiles(plan, num_tokens, prefill.num_queries // group)
        decode_splits = num_splits(
            num_decodes * kv_heads, plan.decode_keys, self._num_processors, DECODE_SPLITS
        )
        prefill_splits = num_splits(
            num_tiles * kv_heads, plan.prefill_keys, self._num_processors, PREFILL_SPLITS
        )
        decode_parts = SplitResults.empty_like(out[:num_decodes], decode_splits)
        prefill_parts = SplitResults.empty_like(out[num_decodes:], prefill_splits)
        shared = {
            **_tensors(q, k_cache, v_cache, out),
            **_scoring(head_dim**-0.5 if scale is None else scale, soft_cap),
            **_rows(plan),
            "sinks": sinks,
        }
        if num_decodes:
            kernels.decode[(kv_heads, decode_splits, num_decodes)](
                **shared,
                **_parts(decode_parts),
                **_options(decode_tile(group, head_dim, q.dtype.itemsize)),
            )
            _merge(decode_parts, out[:num_decodes])
        if plan.longest_query:
            kernels.prefill[(kv_heads, prefill_splits, num_tiles)](
                **shared,
                **_parts(prefill_parts),
                **_options(prefill),
                row_starts=plan.row_starts,
                first_row=num_decodes,
                num_rows=len(plan.context_lens),
            )
            _merge(prefill_parts, out[num_decodes:])
        return out


@dataclass(frozen=True, slots=True)
class SplitResults:
    """Memory for the results of S splits, of N tokens."""

    #: [N, H, S, D] and [N, H, S] float32.
    out: Tensor
    logs: Tensor

    @classmethod
    def empty_like(cls, out: Tensor, splits: int) -> Self | None:
        """Return memory for the results of tokens out [N, H, D]; None if they are not split."""
        if splits == 1:
            return None
        num_tokens, num_heads, head_dim = out.shape
        shape = (num_tokens, num_heads, splits)
        logs = torch.empty(shape, dtype=torch.float32, device=out.device)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=out.device)
        return cls(parts, logs)


def _parts(parts: SplitResults | None) -> dict[str, Any]:
    """Return the kernel arguments for the memory of the results of splits."""
    return {
        "part_out": None if parts is None else parts.out,
        "part_logs": None if parts is None else parts.logs,
        "IS_SPLIT": parts is not None,
    }


def _merge(parts: SplitResults | None, out: Tensor) -> None:
    """Add up the results of splits, if there are any, into out [N, H, D]."""
    if parts is None:
        return
    num_tokens, num_heads, head_dim = out.shape
    kernels.merge[(num_heads, num_tokens)](
        part_out=parts.out,
        part_logs=parts.logs,
        out=out,
        num_splits=parts.logs.shape[2],
        out_row_stride=out.stride(0),
        out_head_stride=out.stride(1),
        MAX_SPLITS=MAX_SPLITS,
        D=head_dim,
        D_PADDED=padded_dim(head_dim),
        enable_fp_fusion=True,
    )


def _num_tiles(plan: TritonPlan, num_tokens: int, tile_tokens: int) -> int:
    """Return how many tiles of queries the rows of several tokens need at most."""
    num_rows = len(plan.context_lens) - plan.num_decodes
    return (num_tokens - plan.num_decodes) // tile_tokens + num_rows


def _rows(plan: TritonPlan) -> dict[str, Any]:
    """Return the kernel arguments that describe the rows of a step: lengths and block tables."""
    return {
        "context_lens": plan.context_lens,
        "table": plan.block_table,
        "table_stride": plan.block_table.stride(0),
        "window": plan.window,
    }


def _options(tile: TileShape) -> dict[str, Any]:
    return {
        "TILE_QUERIES": tile.num_queries,
        "TILE_KEYS": tile.num_keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }


def _tensors(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> dict[str, Any]:
    """Return the tensors of a layer as arguments of the kernels, with their strides and sizes."""
    head_dim = q.shape[-1]
    return {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "out": out,
        "q_row_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "out_row_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "block_stride": k_cache.stride(0),
        "token_stride": k_cache.stride(1),
        "kv_head_stride": k_cache.stride(2),
        "GROUP": q.shape[1] // k_cache.shape[2],
        "BLOCK_TOKENS": k_cache.shape[1],
        "D": head_dim,
        "D_PADDED": padded_dim(head_dim),
    }


def _scoring(scale: float, soft_cap: float | None) -> dict[str, float | None]:
    """Return the factors of the scores (worker/kernels/triton/attention.py)."""
    if scale <= 0:
        raise ValueError(f"scale ({scale}) must be positive")
    if soft_cap is None:
        return {"factor": scale * LOG2_E, "cap_factor": None}
    return {"factor": soft_cap * LOG2_E, "cap_factor": scale / soft_cap}


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_tokens: int) -> None:
    """Raise ValueError for tensors that the kernels would read wrongly."""
    if k_cache.dtype not in CACHE_DTYPES or not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"queries in {q.dtype} and a cache of {k_cache.dtype}: Triton attention needs the same "
            f"dtype for both, one of {', '.join(map(str, CACHE_DTYPES))}"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1 or q.stride(-1) != 1:
        raise ValueError(
            "the items of a head must be adjacent, and k and v must have equal strides"
        )
    if k_cache.shape[1] != block_tokens:
        raise ValueError(f"blocks of {k_cache.shape[1]} tokens, not {block_tokens}")


def _largest(numbers: Tensor) -> int:
    """Return the largest of some numbers on the CPU; 0 if there are none."""
    return int(numbers.max()) if len(numbers) else 0
