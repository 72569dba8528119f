"""The exponential of worker/kernels/triton/exact_numbers.py, operation by operation in torch.

All operations round correctly in both, so both have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.sampling.exact_probs import weigh
from worker.sampling.sampler import Draws, keep_from


def exact_exp(x: Tensor) -> Tensor:
    """Return exp(x) of float32 x <= 0; 0 below -87."""
    y = x.clamp(min=-87.0)
    n = (y * 1.4426950408889634 + 0.5).floor()
    r = y - n * 0.693359375
    r = r + n * 2.1219444005469057e-04
    p = r * 0.0013814320470879827 + 0.008368851204697565
    for coefficient in (0.041668401095087036, 0.16666519522901047, 0.4999999337300976):
        p = p * r + coefficient
    p = p * r * r + r + 1.0
    power = ((n.int() + 127) << 23).view(torch.float32)
    return torch.where(x >= -87.0, p * power, 0.0)


def bounds_and_masses(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return the bound on the shares [N] and the sum of the kept weights [N] of rows [N, V]."""
    shares = exact_exp((logits - logits.amax(-1)[:, None]).div_(draws.temperature[:, None]))
    bound = keep_from(shares, draws)
    bounds = torch.zeros(len(logits)) if bound is None else bound
    weights = weigh(shares, shares.shape[1]).masked_fill_(shares < bounds[:, None], 0)
    return bounds, weights.sum(-1)
