"""Represents probabilities as integers, so that every sum over the vocabulary is exact.

A floating-point sum depends on the order of its additions, and that order depends on the number of
rows in the batch. An integer sum does not. So everything computed from integer sums (a cumulative
distribution, a nucleus, a normaliser) has the same bits in any batch and on every device. All other
arithmetic is on single items, or is the maximum of a row, which does not depend on the order.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_FLOAT_BITS = 52
"""A row's total weight stays below 2**52. So a float64 represents it exactly, and its product with
u in [0, 1) is below the total even after rounding."""
CACHED_ROWS = 8
"""Number of rows that are processed together on the CPU. Their intermediate results fit into its
cache."""


def rows_at_once(device: torch.device) -> int:
    """Return the number of rows to process together. It does not affect the bits of a row's
    result."""
    return CACHED_ROWS if device.type == "cpu" else 1 << 30


def scale_bits(vocab: int) -> int:
    """Return the exponent b of the most likely token's weight, 2**b. A token that is more than 2**b
    times less likely has weight 0."""
    return EXACT_FLOAT_BITS - vocab.bit_length()


def relative(logits: Tensor, peaks: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return exp((logits [N, V] - peaks [N]) / temperature [N]): 1 for the most likely token."""
    gaps = logits - peaks[:, None]
    return (gaps if temperature is None else gaps.div_(temperature[:, None])).exp_()


def weigh(shares: Tensor, vocab: int) -> Tensor:
    """Convert shares [...] float32 in [0, 1] to int64 weights, scaled by 2**scale_bits(vocab)."""
    return (shares * 2.0 ** scale_bits(vocab)).to(torch.int64)
