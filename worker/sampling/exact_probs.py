"""Represents probabilities as integers, so that every sum over the vocabulary is exact.

A floating-point sum depends on the order of its additions, and that order depends on the number of
rows in the batch. An integer sum does not. So everything computed from integer sums (a cumulative
distribution, a nucleus, a normaliser) has the same bits in any batch and on every device. All other
arithmetic is on single items, or is the maximum of a row, which does not depend on the order. The
exponential is our own, so it has the same bits on every processor and GPU, and the compiled kernels
(kernels/csrc/sampling.h, kernels/triton/exact_numbers.py) choose the tokens that this code chooses.

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


def exact_exp(x: Tensor) -> Tensor:
    """Return exp(x) of float32 x <= 0, within 1 unit in the last place; 0 below -87 and for NaN.

    It is 2**n * exp(r) with |r| <= ln(2) / 2. Each operation rounds correctly.
    """
    y = x.clamp(min=-87.0)
    n = (y * 1.4426950408889634).add_(0.5).floor_()
    # n * 0.693359375 is exact: that is ln(2) in 9 bits, and n has 7.
    r = y.sub_(n * 0.693359375).add_(n * 2.1219444005469057e-04)
    p = r * 0.0013814320470879827
    for coefficient in (
        *(0.008368851204697565, 0.041668401095087036),
        *(0.16666519522901047, 0.4999999337300976),
    ):
        p = p.add_(coefficient).mul_(r)
    p = p.mul_(r).add_(r).add_(1.0)
    power = n.int().add_(127).bitwise_left_shift_(23).view(torch.float32)
    return p.mul_(power).masked_fill_(~(x >= -87.0), 0)


def relative(logits: Tensor, peaks: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return exp((logits [N, V] - peaks [N]) / temperature [N]): 1 for the most likely token."""
    gaps = logits - peaks[:, None]
    return exact_exp(gaps if temperature is None else gaps.div_(temperature[:, None]))


def weigh(shares: Tensor, vocab: int) -> Tensor:
    """Convert shares [...] float32 in [0, 1] to int64 weights, scaled by 2**scale_bits(vocab)."""
    return (shares * 2.0 ** scale_bits(vocab)).to(torch.int64)
