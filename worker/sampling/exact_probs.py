"""Probabilities as integers, so that every sum over the vocabulary is exact.

A floating-point sum depends on the order in which the hardware adds, and that order depends on how
many rows are in the batch. Integer sums do not: whatever is computed from them (a cumulative
distribution, a nucleus, a normaliser) has the same bits alone and in any batch, on every device.
What remains is arithmetic on single items, and the maximum of a row, which no order changes.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_FLOAT_BITS = 52
"""A row's total stays below 2**52, so that it and its product with u in [0, 1) fit a float64."""


CACHED_ROWS = 8
"""Rows worked on together on the CPU: what is computed for them stays in its cache."""


def rows_at_once(device: torch.device) -> int:
    """Into how many rows work is cut. Whatever the number, a row's result has the same bits."""
    return CACHED_ROWS if device.type == "cpu" else 1 << 30


def scale_bits(vocab: int) -> int:
    """The most likely token weighs 2**scale_bits; what is more than that less likely, nothing."""
    return EXACT_FLOAT_BITS - vocab.bit_length()


def relative(logits: Tensor, peaks: Tensor, temperature: Tensor | None = None) -> Tensor:
    """exp((logits [N, V] - peaks [N]) / temperature [N]): in [0, 1], 1 for the most likely."""
    gaps = logits - peaks[:, None]
    return (gaps if temperature is None else gaps.div_(temperature[:, None])).exp_()


def weigh(shares: Tensor, vocab: int) -> Tensor:
    """Shares [...] float32 in [0, 1] -> int64 weights, scaled by 2**scale_bits(vocab)."""
    return (shares * 2.0 ** scale_bits(vocab)).to(torch.int64)
