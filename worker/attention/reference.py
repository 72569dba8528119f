"""Attention in its plainest form: one position of one row at a time, in float32.

Tests compare all other backends with this one. It is never used to serve. Legend in base.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.base import AttentionBatch


class ReferenceAttention:
    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionBatch) -> Tensor:
        out = torch.empty_like(q)
        for row, table in enumerate(plan.block_table):
            start, stop = plan.row_starts[row : row + 2].tolist()
            num_before = int(plan.context_lens[row]) - (stop - start)
            keys = k_cache[table].flatten(0, 1).float()
            values = v_cache[table].flatten(0, 1).float()
            for token in range(start, stop):
                visible = num_before + token - start + 1
                out[token] = _attend(q[token].float(), keys[:visible], values[:visible]).to(q.dtype)
        return out


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention output [H, D] of one query.

    q              [H, D]
    keys, values   [N, H_kv, D], all of them visible
    """
    heads, head_dim = q.shape
    group = heads // keys.shape[1]
    out = torch.empty_like(q)
    for head in range(heads):
        scores = keys[:, head // group] @ q[head] * head_dim**-0.5
        out[head] = torch.softmax(scores, 0) @ values[:, head // group]
    return out
