"""Attention over the paged cache on GPUs, with the Triton kernels of worker/kernels/triton.

A step is planned from numbers on the host: the longest query, the longest context and the number of
rows of each kind. The rows themselves are described in the GPU's memory. So neither the plan nor a
layer waits for the GPU, and a captured graph can be replayed with other rows, if their numbers do
not exceed those of the step that was captured.

A layer needs one launch for rows of one token, another one if their keys are split, and one for all
other rows. The bits of a row's output depend on the number of splits, and so on the other rows.

Legend as in base.py, and G = H / H_kv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from worker.attention.base import AttentionBatch
from worker.kernels.triton import attention as kernels

LOG2_E = log2(e)
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of caches that the kernels read. Queries have the same dtype."""
MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 128
"""Fewest keys of a split. With fewer, merging costs more than it saves."""
SPLIT_SLACK = 1.25
"""Fewer splits are preferred if the step then takes at most this many times as long."""
PROGRAMS_PER_PROCESSOR = 2
NUM_STAGES = 5
TILE_NUMBERS = 1 << 13
"""Numbers of 16 bits in a tile of keys. There are as many in a tile of values. Two tiles of each,
and the queries, fit into the shared memory of all GPUs that are supported."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of the tiles of a kernel, and how many threads and stages compute them."""

    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Return arguments of a launch."""
        return {
            "TILE_QUERIES": self.num_queries,
            "TILE_KEYS": self.num_keys,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True, slots=True)
class TritonPlan:
    #: [R + 1], [R] and [R, M] int32 on the GPU.
    row_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    num_decodes: int
    #: Most tokens in a row; of all rows of several tokens.
    longest_query: int
    #: Most keys that a row of one token sees.
    longest_decode: int
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
        if like is not None:
            return replace(like, block_table=batch.block_table)
        assert batch.device_row_starts is not None
        assert batch.device_context_lens is not None
        num_decodes = batch.num_decodes
        counts = batch.row_starts.diff()[num_decodes:]
        longest = int(batch.context_lens[:num_decodes].max()) if num_decodes else 0
        return TritonPlan(
            row_starts=batch.device_row_starts,
            context_lens=batch.device_context_lens,
            block_table=batch.block_table,
            num_decodes=num_decodes,
            longest_query=int(counts.max()) if len(counts) else 0,
            longest_decode=longest if window is None else min(longest, window),
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
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        shared = {
            **_tensors(q, k_cache, v_cache, out),
            **_scoring(scale, soft_cap),
            "sinks": sinks,
            "window": plan.window,
            "table": plan.block_table,
            "table_stride": plan.block_table.stride(0),
            "context_lens": plan.context_lens,
        }
        if plan.num_decodes:
            self._decode(shared, out, plan)
        if plan.longest_query:
            _prefill(shared, out, plan)
        return out

    def _decode(self, shared: dict[str, Any], out: Tensor, plan: TritonPlan) -> None:
        """Launch the kernels for the rows of one token."""
        num_rows, (_, num_heads, head_dim) = plan.num_decodes, out.shape
        kv_heads = num_heads // shared["GROUP"]
        splits = num_splits(num_rows * kv_heads, plan.longest_decode, self._num_processors)
        part_out = part_logs = None
        if splits > 1:
            logs = (num_rows, num_heads, splits)
            part_logs = torch.empty(logs, dtype=torch.float32, device=out.device)
            part_out = torch.empty((*logs, head_dim), dtype=torch.float32, device=out.device)
        kernels.decode[(kv_heads, splits, num_rows)](
            **shared,
            part_out=part_out,
            part_logs=part_logs,
            IS_SPLIT=splits > 1,
            **decode_tile(shared["GROUP"], head_dim, out.dtype.itemsize).options,
        )
        if splits > 1:
            kernels.merge[(num_heads, num_rows)](
                part_out=part_out,
                part_logs=part_logs,
                num_splits=splits,
                MAX_SPLITS=MAX_SPLITS,
                enable_fp_fusion=True,
                **{name: shared[name] for name in MERGED},
            )


def _prefill(shared: dict[str, Any], out: Tensor, plan: TritonPlan) -> None:
    """Launch the kernel for the rows of several tokens."""
    num_tokens, num_heads, head_dim = out.shape
    group, num_rows = shared["GROUP"], len(plan.context_lens)
    tile = prefill_tile(group, head_dim, out.dtype.itemsize)
    num_tiles = (num_tokens - plan.num_decodes) // (tile.num_queries // group)
    num_tiles += num_rows - plan.num_decodes
    kernels.prefill[(num_heads // group, num_tiles)](
        **shared,
        row_starts=plan.row_starts,
        first_row=plan.num_decodes,
        num_rows=num_rows,
        **tile.options,
    )


MERGED = ("out", "context_lens", "out_row_stride", "out_head_stride", "D", "D_PADDED")
"""Arguments that `merge` shares with the other kernels."""


def num_splits(num_programs: int, num_keys: int, num_processors: int) -> int:
    """Return into how many parts the keys of each decode row are split.

    num_programs   programs of a launch without splits: rows times key/value heads
    num_keys       most keys that a row sees

    A GPU runs PROGRAMS_PER_PROCESSOR programs on each processor at the same time. A launch takes as
    many rounds as are needed for all programs, and a round takes as long as the longest split.
    """
    slots = PROGRAMS_PER_PROCESSOR * num_processors
    most = min(MAX_SPLITS, max(1, num_keys // MIN_SPLIT_TOKENS))
    times = [-(-num_programs * splits // slots) / splits for splits in range(1, most + 1)]
    limit = min(times) * SPLIT_SLACK
    return 1 + next(i for i, time in enumerate(times) if time <= limit)


def decode_tile(group: int, head_dim: int, itemsize: int) -> TileShape:
    """Return the tiles of `decode`: all queries of a group."""
    num_queries = max(16, _power_of_two(group))
    if itemsize == 4:
        return _float32_tile(num_queries, head_dim)
    num_warps = 4 if num_queries < 64 else 8
    return TileShape(num_queries, _tile_keys(head_dim), num_warps, NUM_STAGES)


def prefill_tile(group: int, head_dim: int, itemsize: int) -> TileShape:
    """Return the tiles of `prefill`: the queries of as many tokens as fit."""
    if itemsize == 4:
        return _float32_tile(max(16, _power_of_two(group)), head_dim)
    most, num_stages = (128, NUM_STAGES) if head_dim <= 128 else (64, NUM_STAGES - 1)
    num_queries = max(most, _power_of_two(group))
    return TileShape(num_queries, _tile_keys(head_dim), 8, num_stages)


def _float32_tile(num_queries: int, head_dim: int) -> TileShape:
    """Return small tiles: the parts of float32 numbers that are multiplied need more registers."""
    return TileShape(num_queries, 32, 4, 3) if head_dim <= 128 else TileShape(num_queries, 16, 8, 3)


def _tile_keys(head_dim: int) -> int:
    return min(max(TILE_NUMBERS // _power_of_two(head_dim), 16), 128)


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
        "D_PADDED": _power_of_two(head_dim),
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


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least n; n >= 1."""
    return 1 << (n - 1).bit_length()
