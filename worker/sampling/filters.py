"""The filters of a chain: each is one function that removes or rescales the tokens of some rows.

A filter takes logits and returns new logits, in which a removed token is -inf. It reads nothing
else but its parameters, so filters can be applied in any order. The definitions are llama.cpp's:

    temperature   divide by the temperature; with dynatemp_range, by one between temperature -
                  range and temperature + range, for which the entropy decides
    top_n_sigma   logits within n standard deviations of the largest one
    top_k         the k most likely tokens
    typ_p         the tokens whose surprise is nearest to the entropy, until they hold typical_p
    top_p         the fewest most likely tokens that hold top_p of the mass
    min_p         tokens at least min_p times as likely as the most likely one
    xtc           with probability xtc_probability, all but the least likely of the tokens that
                  have at least xtc_threshold

As in sampler.py, tokens that are as likely as the last one that is kept are kept, too, and each sum
over the vocabulary is a sum of integers (exact_probs.py). A row without a finite maximum gets
arbitrary logits.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.sampling.exact_probs import exact_exp, relative, scale_bits, weigh
from worker.sampling.sampler import heaviest, kth_largest

REMOVED = float("-inf")
FARTHEST = -200.0
"""Gap to the most likely token beyond which a share is 0 in float32."""


def keep_top_k(logits: Tensor, top_k: Tensor, max_k: int) -> Tensor:
    """Keep the top_k [N] most likely tokens of logits [N, V]. `max_k` is the largest top_k, at most
    V."""
    # A NaN is kept, so that the row is reported.
    return _kept(logits, ~(logits < kth_largest(logits, top_k, max_k)[:, None]))


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the most likely tokens of logits [N, V] that hold top_p [N] of the mass."""
    shares = relative(logits, logits.amax(-1))
    bound = heaviest(shares, weigh(shares, shares.shape[1]), top_p)
    return _kept(logits, shares >= bound[:, None])


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep the tokens of logits [N, V] at least min_p [N] times as likely as the most likely
    one."""
    return _kept(logits, relative(logits, logits.amax(-1)) >= min_p[:, None])


def keep_typical(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the tokens of logits [N, V] whose surprise is nearest to the entropy, until they hold
    typical_p [N] of the mass.

    Surprise and entropy have the normaliser in common, which their difference does not need.
    """
    gaps = _gaps(logits)
    shares = exact_exp(gaps)
    weights = weigh(shares, shares.shape[1])
    mean_gap = _mean_gap(gaps, shares, weights)
    nearness = exact_exp((gaps - mean_gap.float()[:, None]).abs_().neg_())
    nearness.masked_fill_(shares == 0, 0)
    bound = heaviest(nearness, weights, typical_p)
    return _kept(logits, nearness >= bound[:, None])


def keep_top_n_sigma(logits: Tensor, top_n_sigma: Tensor) -> Tensor:
    """Keep the logits [N, V] that are at most top_n_sigma [N] standard deviations below the largest
    one. Removed tokens do not count."""
    gaps = logits.amax(-1)[:, None] - logits
    is_kept = gaps.isfinite()
    count = is_kept.sum(-1).double()
    gaps = gaps.masked_fill(~is_kept, 0)
    widest = gaps.amax(-1)
    scaled = gaps / widest.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    unit = 2.0 ** -scale_bits(logits.shape[1])
    mean = weigh(scaled, logits.shape[1]).sum(-1).double() * unit / count
    square = weigh(scaled.square_(), logits.shape[1]).sum(-1).double() * unit / count
    sigma = (square - mean.square_()).clamp_min_(0).sqrt_() * widest
    return _kept(logits, gaps <= (top_n_sigma * sigma).float()[:, None])


def scale(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide logits [N, V] by temperature [N]. The largest logit of each row becomes 0. With
    temperature 0, only the most likely tokens are kept."""
    gaps = logits - logits.amax(-1)[:, None]
    scaled = gaps / temperature[:, None]
    return torch.where(gaps == 0, gaps, scaled)


def dynamic_temperature(
    logits: Tensor, temperature: Tensor, spread: Tensor, exponent: Tensor
) -> Tensor:
    """Return the temperatures [N] for logits [N, V]: temperature + spread if all tokens that are
    left are equally likely, and temperature - spread, at least 0, if one token has all mass.
    Between these, the entropy's part of its maximum, to the power `exponent`, decides. A row with
    one token left has temperature 1. All arguments but logits are [N]."""
    gaps = _gaps(logits)
    shares = exact_exp(gaps)
    weights = weigh(shares, shares.shape[1])
    mass = weights.sum(-1).double() * 2.0 ** -scale_bits(logits.shape[1])
    entropy = mass.log() - _mean_gap(gaps, shares, weights)
    count = (logits > REMOVED).sum(-1).double()
    part = (entropy / count.log()).clamp_(0, 1).pow_(exponent.double())
    lowest, highest = (temperature - spread).clamp_min(0), temperature + spread
    dynamic = lowest + (highest - lowest) * part.float()
    return torch.where(count > 1, dynamic, 1.0)


def exclude_top(logits: Tensor, threshold: Tensor, applies: Tensor) -> Tensor:
    """Remove the tokens of logits [N, V] whose probability is at least threshold [N], except the
    least likely of them. Rows for which applies [N] bool is false are unchanged."""
    shares = relative(logits, logits.amax(-1))
    weights = weigh(shares, shares.shape[1])
    unit = 2.0 ** -scale_bits(logits.shape[1])
    is_top = shares >= (threshold * weights.sum(-1).double() * unit).float()[:, None]
    is_top &= logits > REMOVED
    least = shares.masked_fill(~is_top, 2.0).amin(-1)
    return _kept(logits, ~(is_top & (shares > least[:, None]) & applies[:, None]))


def _kept(logits: Tensor, is_kept: Tensor) -> Tensor:
    return logits.masked_fill(~is_kept, REMOVED)


def _gaps(logits: Tensor) -> Tensor:
    """Return logits [N, V] minus each row's largest one, at least FARTHEST."""
    return (logits - logits.amax(-1)[:, None]).clamp_min_(FARTHEST)


def _mean_gap(gaps: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
    """Return the expected gap [N] float64 of a token that is drawn: the entropy is the logarithm of
    the mass minus this number. All arguments are [N, V]."""
    # A share times its negative gap is at most 1 / e, so it is a weight like the share itself.
    products = weigh(shares * gaps.neg(), gaps.shape[1])
    return -(products.sum(-1).double() / weights.sum(-1).double())
