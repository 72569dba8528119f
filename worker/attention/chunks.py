"""Attention in chunks: a token sees the tokens of its own chunk of the text only, as in Llama 4.

A row is cut where a chunk ends, and each part becomes a row whose text begins with its chunk. So
every backend computes chunks, without a mask of its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from worker.attention.base import AttentionBatch
from worker.device.staging import upload


def in_chunks(batch: AttentionBatch, chunk_tokens: int, block_tokens: int) -> AttentionBatch:
    """Return the batch of a step for layers whose tokens see `chunk_tokens` tokens of a chunk.

    block_tokens   tokens of a block, which divides `chunk_tokens`

    The positions and the slots are those of `batch`: only attention reads the result.
    """
    assert chunk_tokens % block_tokens == 0
    lens, row_counts = batch.context_lens.numpy(), batch.row_starts.diff().numpy()
    firsts = (lens - row_counts) // chunk_tokens
    num_parts = np.where(row_counts > 0, (lens - 1) // chunk_tokens - firsts + 1, 0)
    rows = np.arange(len(lens)).repeat(num_parts)
    part = np.arange(len(rows)) - (num_parts.cumsum() - num_parts).repeat(num_parts)
    chunks = firsts[rows] + part
    starts = chunks * chunk_tokens
    ends = np.minimum(starts + chunk_tokens, lens[rows])
    counts = ends - np.maximum(starts, (lens - row_counts)[rows])
    bounds = torch.from_numpy(np.concatenate([[0], counts]).cumsum())
    seen = torch.from_numpy(ends - starts)
    table, width = batch.block_table, batch.block_table.shape[1]
    device = table.device
    from_rows, first_blocks = upload([rows, starts // block_tokens], device)
    columns = first_blocks[:, None] + torch.arange(width, device=device)
    blocks = table.index_select(0, from_rows).gather(1, columns.clamp(max=width - 1))
    is_gpu = batch.device_row_starts is not None
    return replace(
        batch,
        row_starts=bounds,
        context_lens=seen,
        block_table=blocks.masked_fill_(columns >= width, 0),
        further=(),
        device_row_starts=bounds.to(device, torch.int32) if is_gpu else None,
        device_context_lens=seen.to(device, torch.int32) if is_gpu else None,
    )
