"""Attention in its plainest form: one position of one row at a time, in float32.

Tests compare all other backends with this one. It is never used to serve. Legend in base.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.attention.base import AttentionBatch
from worker.kv.rounding import numbers_of


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    batch: AttentionBatch
    window: int | None


class ReferenceAttention:
    is_capturable = False

    def plan(
        self, batch: AttentionBatch, window: int | None = None, like: Any = None
    ) -> ReferencePlan:
        return ReferencePlan(batch, window)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: ReferencePlan,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out, batch = torch.empty_like(q), plan.batch
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        for row, table in enumerate(batch.block_table):
            start, stop = batch.row_starts[row : row + 2].tolist()
            unseen = int(batch.context_lens[row]) - (stop - start)
            keys, values = (
                numbers_of(cache[table], torch.float32).flatten(0, 1).float()
                for cache in (k_cache, v_cache)
            )
            for token in range(start, stop):
                end = unseen + token - start + 1
                first = 0 if plan.window is None else max(end - plan.window, 0)
                if batch.seen_ends is not None:
                    end = int(batch.seen_ends[token])
                seen = slice(first, end)
                visible = (q[token].float(), keys[seen], values[seen])
                result = _attend(*visible, scale=scale, soft_cap=soft_cap, sinks=sinks)
                out[token] = result.to(q.dtype)
        return out


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention [H, D] of q [H, D] to keys and values [N, H_kv, D], all of them
    visible."""
    heads = q.shape[0]
    group = heads // keys.shape[1]
    out = torch.empty_like(q)
    for head in range(heads):
        scores = keys[:, head // group] @ q[head] * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1]])
        weights = torch.softmax(scores, 0)[: len(keys)]
        out[head] = weights @ values[:, head // group]
    return out
