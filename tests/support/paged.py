"""Steps through the paged cache without an engine: requests whose blocks lie scattered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention.base import AttentionBatch


@dataclass(frozen=True)
class Row:
    """`count` tokens after `computed` earlier ones, in the cache's `blocks`."""

    computed: int
    count: int
    blocks: Sequence[int]


def attention_batch(rows: Sequence[Row], block_tokens: int, *, padding: int = 0) -> AttentionBatch:
    """`padding`: unused columns of the block table. Rows of one token must come first."""
    positions = [p for row in rows for p in range(row.computed, row.computed + row.count)]
    owners = [row for row in rows for _ in range(row.count)]
    width = max(len(row.blocks) for row in rows) + padding
    counts = [row.count for row in rows]
    num_decodes = next((i for i, count in enumerate(counts) if count > 1), len(rows))
    return AttentionBatch(
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(
            [
                row.blocks[p // block_tokens] * block_tokens + p % block_tokens
                for row, p in zip(owners, positions, strict=True)
            ]
        ),
        row_starts=torch.tensor([0, *counts]).cumsum(0),
        context_lens=torch.tensor([row.computed + row.count for row in rows]),
        block_table=_padded([row.blocks for row in rows], width),
        num_decodes=num_decodes,
    )


def _padded(tables: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor([[*table, *([0] * (width - len(table)))] for table in tables])


def scattered(num_blocks: int, *sizes: int, seed: int = 0) -> list[list[int]]:
    """For each size so many blocks, none of them twice, none the null block, in no order."""
    generator = torch.Generator().manual_seed(seed)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [order[start : start + size] for start, size in zip(starts, sizes, strict=True)]
