"""The structs that describe the attention of a step to the compiled kernels.

Every function checks what the C++ code assumes. A struct points at the tensors that it is made of,
so it must not outlive them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.base import AttentionBatch
from worker.kernels import structs
from worker.kernels.addresses import address


def batch_struct(batch: AttentionBatch, block_tokens: int) -> structs.CRows:
    """Return the struct that describes `batch` to the kernels. It points at tensors of `batch`, so
    it must not outlive them."""
    integers = [batch.slot_mapping, batch.row_starts, batch.context_lens, batch.block_table]
    if batch.seen_ends is not None:
        assert batch.seen_ends.shape == batch.positions.shape
        integers.append(batch.seen_ends)
    assert all(tensor.dtype == torch.int64 for tensor in integers)
    return structs.CRows(
        address(batch.row_starts),
        address(batch.context_lens),
        address(batch.block_table),
        len(batch.context_lens),
        batch.num_decodes,
        batch.block_table.shape[1],
        block_tokens,
        address(batch.seen_ends),
    )


def scoring_struct(
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: Tensor | None = None,
    *,
    heads: int,
    sees_runs: bool = True,
) -> structs.CScoring:
    """Return the struct that describes how a layer computes attention scores. The arguments are
    those of `Attention.run` and `Attention.plan`.

    sinks       [heads] float32; the struct points at them, so it must not outlive them
    sees_runs   whether `AttentionBatch.seen_ends` applies to the layer
    """
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype == torch.float32)
    return structs.CScoring(scale, soft_cap or 0.0, window or 0, address(sinks), sees_runs)


def indexed_tokens_struct(
    queries: Tensor, index_keys: Tensor, block_table: Tensor, rows: Tensor, visible: Tensor
) -> structs.CIndexedTokens:
    """Return the struct that describes the tokens of `Kernels.index_scores`, whose arguments these
    are."""
    (count, heads, dim), width = queries.shape, int(visible.max())
    _, block_tokens, num_heads, _ = index_keys.shape
    assert rows.shape == visible.shape == (count,)
    assert all(each.dtype == torch.int64 for each in (block_table, rows, visible))
    assert num_heads == 1
    assert width <= block_table.shape[1] * block_tokens
    return structs.CIndexedTokens(
        *map(address, (rows, visible, block_table)),
        count,
        block_table.shape[1],
        block_tokens,
        index_keys.stride(0),
        heads,
        dim,
        width,
    )
