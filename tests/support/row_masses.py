"""The bounds and masses of sampled rows, as the Triton kernels must find them."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.sampling.exact_probs import relative, weigh
from worker.sampling.sampler import Draws, keep_from


def bounds_and_masses(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return the bound on the shares [N] and the sum of the kept weights [N] of rows [N, V]."""
    shares = relative(logits, logits.amax(-1), draws.temperature)
    bound = keep_from(shares, draws)
    bounds = torch.zeros(len(logits)) if bound is None else bound
    weights = weigh(shares, shares.shape[1]).masked_fill_(shares < bounds[:, None], 0)
    return bounds, weights.sum(-1)
