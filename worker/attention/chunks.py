"""Attention in chunks: a token sees the tokens of its own chunk of the text only, as in Llama 4.

A row is cut where a chunk ends, and each part becomes a row whose text begins with its chunk. So
every backend computes chunks, without a mask of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from worker.attention.base import AttentionBatch


def in_chunks(batch: AttentionBatch, chunk_tokens: int, block_tokens: int) -> AttentionBatch:
    """Return the batch of a step for layers whose tokens see `chunk_tokens` tokens of a chunk.

    block_tokens   tokens of a block, which divides `chunk_tokens`

    The positions and the slots are those of `batch`: only attention reads the result.
    """
    assert chunk_tokens % block_tokens == 0
    counts, rows, starts = [], [], []
    lens = batch.context_lens.tolist()
    for row, (length, count) in enumerate(zip(lens, batch.row_starts.diff().tolist(), strict=True)):
        first = length - count
        while first < length:
            start = first // chunk_tokens * chunk_tokens
            end = min(start + chunk_tokens, length)
            counts.append(end - first)
            rows.append(row)
            starts.append(start)
            first = end
    table, width = batch.block_table, batch.block_table.shape[1]
    device = table.device
    chunk_starts, bounds = torch.tensor(starts), torch.tensor([0, *counts]).cumsum(0)
    seen = batch.context_lens[rows].clamp_(max=chunk_starts + chunk_tokens).sub_(chunk_starts)
    columns = (chunk_starts // block_tokens).to(device)[:, None] + torch.arange(
        width, device=device
    )
    blocks = table[torch.tensor(rows, device=device)].gather(1, columns.clamp(max=width - 1))
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
