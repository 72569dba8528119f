"""Biases of attention's scores that depend only on the distance of two tokens: ALiBi's, and those
that a model has learned.

Such a bias is one number for each head and each offset, which is the key's position minus the
query's. So a model keeps a table of these numbers, and every step reads its scores' biases from it.

Legend: H heads, C the most tokens of an input; an offset is within -(C - 1)..C - 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.encoders.spec import MAX_OFFSET, OFFSET_BUCKETS


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the factor of the distance of two tokens for each head: a geometric series if the
    number of heads is a power of two, otherwise that of the next smaller power of two, followed by
    every second item of the series for twice as many heads."""
    power = 1 << (num_heads.bit_length() - 1)
    ratio = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    slopes = [ratio ** (index + 1) for index in range(power)]
    if power < num_heads:
        slopes += alibi_slopes(2 * power)[::2][: num_heads - power]
    return slopes


def alibi_bias(num_heads: int, context: int) -> Tensor:
    """Return the biases [H, 2 * C - 1] float32 of ALiBi."""
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32)
    return -slopes[:, None] * _offsets(context).abs()


def bucketed_bias(learned: Tensor, context: int) -> Tensor:
    """Return the biases [H, 2 * C - 1] of learned ones [OFFSET_BUCKETS, H]."""
    buckets = offset_buckets(_offsets(context)).to(learned.device)
    return learned.index_select(0, buckets).T.contiguous()


def offset_buckets(offsets: Tensor) -> Tensor:
    """Return the bucket of each offset, as T5 and MPNet do. Half of the buckets are for later keys,
    half for the others. In each half, the first buckets are for one distance each. The rest grow by
    equal factors up to MAX_OFFSET, and all longer distances share the last one."""
    half = OFFSET_BUCKETS // 2
    exact = half // 2
    distances = offsets.abs()
    # In float32: its rounding decides the bucket of distances at a border.
    growth = torch.log(distances.clamp(min=1).float() / exact) / math.log(MAX_OFFSET / exact)
    grown = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distances < exact, distances, grown) + half * (offsets > 0)


def bias_tile(table: Tensor, queries: range, keys: range) -> Tensor:
    """Return the biases [H, len(queries), len(keys)] of the scores of neighbouring queries and
    keys, from a table [H, 2 * C - 1]."""
    origin = table.shape[1] // 2
    lowest = keys.start - (queries.stop - 1) + origin
    highest = keys.stop - 1 - queries.start + origin
    # Each query's row starts one offset before that of the query before it.
    return table[:, lowest : highest + 1].unfold(1, len(keys), 1).flip(1)


def _offsets(context: int) -> Tensor:
    return torch.arange(1 - context, context)
