"""Attention to the tokens that an indexer selects (layers/indexer.py), with any backend.

For each token, the scores of all tokens up to it are computed exactly, and the tokens with the
largest ones are selected. Of tokens with equal scores, the earlier ones are. Then the latents of
the selected tokens are copied, in the order of their positions, into blocks of their own: each
token becomes a row of one token, and a backend reads these rows like any others.

Tokens are computed in tiles, which limit the memory for scores and copies. A tile may have tokens
of several rows, so there is no loop over requests.

Legend: T tokens of the step, R rows, n tokens of a tile, N tokens that the last of them sees, H
index heads, D numbers of an index key, K most tokens that are selected for a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.attention.base import Attention, AttentionBatch
from worker.device.staging import upload_one
from worker.kernels.base import Kernels
from worker.spec.latent import TILE_KEYS

TILE_TOKENS = 128
"""Most tokens in a tile."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens of a step, each of which sees at most `top` selected ones.

    rows      [T] the row of each token, on the CPU
    visible   [T] the number of tokens up to itself, on the CPU
    top       K
    """

    batch: AttentionBatch
    rows: Tensor
    visible: Tensor
    block_tokens: int
    top: int

    @classmethod
    def of(cls, batch: AttentionBatch, block_tokens: int, top: int) -> Selection | None:
        """Return the selection of a step; None if all tokens see at most `top` tokens."""
        lens, counts = batch.context_lens, batch.row_starts.diff()
        if not len(lens) or int(lens.max()) <= top:
            return None
        rows = torch.repeat_interleave(torch.arange(len(lens)), counts)
        before = lens - counts - batch.row_starts[:-1]
        visible = torch.arange(1, len(rows) + 1) + before[rows]
        return cls(batch, rows, visible, block_tokens, top)

    def positions(
        self, queries: Tensor, weights: Tensor, index_keys: Tensor, kernels: Kernels
    ) -> Tensor:
        """Return the positions [T, K] of the selected tokens, in ascending order. If a token sees
        fewer than K tokens, all of them come first.

        queries      [T, H, D]
        weights      [T, H] float32
        index_keys   [B, block_tokens, 1, W] the layer's index keys, those of the step included
        """
        device = queries.device
        chosen = torch.zeros(len(queries), self.top, dtype=torch.int64, device=device)
        for tile in _tiles(self.visible):
            scores = kernels.index_scores(
                queries[tile],
                weights[tile],
                index_keys,
                self.batch.block_table,
                self.rows[tile],
                self.visible[tile],
            )
            found = largest(scores, min(self.top, scores.shape[1]))
            chosen[tile, : found.shape[1]] = found
        return chosen

    def attend(
        self, q: Tensor, latents: Tensor, positions: Tensor, attention: Attention, *, scale: float
    ) -> Tensor:
        """Return the attention like `Attention.run`, of each token to the tokens at `positions`.

        latents   the layer's cache, which holds the latents of the step, too
        """
        size, device = self.block_tokens, q.device
        out, seen = torch.zeros_like(q), self.visible.clamp(max=self.top)
        for tile in _tiles(seen):
            num_blocks = -(-int(seen[tile].max()) // size)
            width = num_blocks * size
            places = positions[tile, :width]
            places = pad(places, (0, width - places.shape[1]))
            table = self.batch.block_table.index_select(0, upload_one(self.rows[tile], device))
            blocks = table.gather(1, places.div(size, rounding_mode="floor"))
            copied = latents[blocks, places.remainder(size)]
            own = copied.view(-1, *latents.shape[1:])
            plan = attention.plan(self._alone(seen[tile], num_blocks))
            out[tile] = attention.run(q[tile], own, own, plan, scale=scale)
        return out

    def _alone(self, seen: Tensor, num_blocks: int) -> AttentionBatch:
        """Return a batch of rows of one token, which see `seen` [n] tokens in `num_blocks` blocks
        each."""
        count, table = len(seen), self.batch.block_table
        blocks = torch.arange(count * num_blocks, dtype=table.dtype, device=table.device)
        starts = torch.arange(count + 1)
        is_gpu = self.batch.device_row_starts is not None
        return AttentionBatch(
            positions=seen - 1,
            slot_mapping=seen - 1,
            row_starts=starts,
            context_lens=seen,
            block_table=blocks.view(count, num_blocks),
            num_decodes=count,
            device_row_starts=starts.to(table.device, torch.int32) if is_gpu else None,
            device_context_lens=seen.to(table.device, torch.int32) if is_gpu else None,
        )


def _tiles(counts: Tensor) -> Iterator[slice]:
    """Yield tiles of tokens that read `counts` [T] tokens each."""
    start, count = 0, len(counts)
    while start < count:
        most = int(counts[start : start + TILE_TOKENS].max())
        stop = min(start + max(1, min(TILE_KEYS // most, TILE_TOKENS)), count)
        yield slice(start, stop)
        start = stop


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the indexes [n, count] of the largest scores [n, N] of each row, in ascending order.
    Of equal scores, the first ones are taken."""
    scores = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    last = scores.topk(count, dim=1).values[:, -1:]
    is_above, is_equal = scores > last, scores == last
    num_equal = count - is_above.sum(1, keepdim=True)
    is_chosen = is_above | (is_equal & (is_equal.cumsum(1) <= num_equal))
    # The number of chosen ones is known, so a GPU need not be waited for.
    return is_chosen.nonzero_static(size=len(scores) * count)[:, 1].view(len(scores), count)
