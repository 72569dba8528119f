"""Attention batches over a paged cache, without an engine. The blocks of a row are scattered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.hashed import hashed_order
from tests.support.kernels import randn
from worker.attention.base import Attention, AttentionBatch
from worker.kv.cache import KVCache
from worker.kv.rounding import round_heads


@dataclass(frozen=True)
class PagedRow:
    """A row of a step: `count` tokens after `computed` earlier ones, in the cache's `blocks`."""

    computed: int
    count: int
    blocks: Sequence[int]


def attention_batch(
    rows: Sequence[PagedRow], block_tokens: int, *, padding: int = 0
) -> AttentionBatch:
    """Return the batch of some rows. Rows of one token must come first.

    padding   number of unused columns of the block table
    """
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
    """Return a list of `size` random blocks for each size, without repeats or the null block."""
    order = [place + 1 for place in hashed_order(num_blocks - 1, seed)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [order[start : start + size] for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class PagedCase:
    """Rows of one step, and a cache with their keys and values.

    Everything else in the cache is NaN. If `zeroed`, the positions of a row's blocks that the row
    does not attend to are zero instead. `kv_dtype` is the dtype of the cache. If `is_latent`, it
    has no values, and its keys are read as values.
    """

    rows: list[PagedRow]
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype
    zeroed: bool
    kv_dtype: torch.dtype
    is_latent: bool = False

    def cache(self) -> KVCache:
        taken = [block for row in self.rows for block in row.blocks]
        size = (1, max(taken) + 3, self.block_tokens, self.kv_heads, self.head_dim)
        cache = KVCache(*size, self.kv_dtype, torch.device("cpu"), is_latent=self.is_latent)
        for tensor in (cache.k, cache.v):
            nan = torch.full((*tensor.shape[:-1], self.head_dim), float("nan"))
            tensor.copy_(round_heads(nan) if cache.is_rounded else nan)
        if self.zeroed:
            cache.zero(torch.tensor([0, *taken]))
        for number, row in enumerate(self.rows):
            shape = (row.computed + row.count, self.kv_heads, self.head_dim)
            slots = attention_batch(
                [PagedRow(0, shape[0], row.blocks)], self.block_tokens
            ).slot_mapping
            k, v = (
                randn(*shape, dtype=self.dtype, seed=100 + 2 * number + part) for part in (0, 1)
            )
            cache.write(0, k, None if self.is_latent else v, slots)
        return cache

    def queries(self) -> Tensor:
        shape = (sum(row.count for row in self.rows), self.heads, self.head_dim)
        return randn(*shape, dtype=self.dtype, seed=4)

    def batch(self, padding: int = 0) -> AttentionBatch:
        return attention_batch(self.rows, self.block_tokens, padding=padding)

    def sinks(self) -> Tensor:
        """Return sinks [H], some of which outweigh all keys together."""
        return randn(self.heads, dtype=torch.float32, seed=5, scale=4.0)

    def seen_ends(self, run: int) -> Tensor:
        """Return the `seen_ends` of a step that has a run of up to `run` tokens in every 2 * `run`
        tokens of each row. A run's tokens see each other."""
        ends = []
        for row in self.rows:
            for token in range(row.count):
                place = token % (2 * run)
                last = token if place >= run else min(token - place + run, row.count) - 1
                ends.append(row.computed + last + 1)
        return torch.tensor(ends)

    def attend(
        self,
        attention: Attention,
        padding: int = 0,
        window: int | None = None,
        run: int = 0,
        **scoring: Any,
    ) -> Tensor:
        """Return the attention of all rows. `scoring` are options of `Attention.run`, and `run` is
        the argument of `seen_ends`; 0: no token sees later ones."""
        batch = self.batch(padding)
        if run:
            batch = batch.with_seen_ends(self.seen_ends(run))
        plan = attention.plan(batch, window)
        return attention.run(self.queries(), *self.cache().layer(0), plan, **scoring)


def case_of(
    *rows: tuple[int, int],
    block_tokens: int = 16,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    zeroed: bool = False,
    kv_dtype: torch.dtype | None = None,
    is_latent: bool = False,
) -> PagedCase:
    """Return a case with the given (computed, count) rows, decode rows first."""
    sizes = [-(-sum(row) // block_tokens) for row in rows]
    blocks = scattered(sum(sizes) + 5, *sizes)
    placed = [PagedRow(*row, own) for row, own in zip(rows, blocks, strict=True)]
    heads = kv_heads * group, kv_heads
    stored = kv_dtype or dtype
    return PagedCase(placed, *heads, head_dim, block_tokens, dtype, zeroed, stored, is_latent)
