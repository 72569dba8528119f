"""Rotary position embeddings: pair (i, i + D/2) of a head rotates by position * inv_freq[i].

Each step computes the sines and cosines of its positions once for all layers, so there is no table
of max_len rows. Legend: T tokens, H heads (queries or keys), D rotated items of a head
(`RopeConfig.width`), which are the whole head or its first part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.spec.rope_config import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    RopeConfig,
    YarnScaling,
)

CosSin = tuple[Tensor, Tensor]
"""cos and sin of a step's rotary angles, [T, 1, D] each, as `rotation` returns them."""


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return the radians per position of each pair, [rope.width / 2] float32."""
    exponents = torch.arange(0, rope.width, 2, dtype=torch.float64) / rope.width
    # Powers in double, because those in float differ between processors in their last bits.
    inv_freq = (1.0 / rope.theta**exponents).float()
    match rope.scaling:
        case NoScaling():
            return inv_freq
        case LinearScaling(factor):
            return inv_freq / factor
        case FactorScaling(factors) | LongRopeScaling(factors):
            return inv_freq / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(inv_freq, scaling)
        case YarnScaling() as scaling:
            return _yarn(inv_freq, scaling, rope.theta)


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    width = high - low if high != low else 0.001  # no ramp, and no division by zero
    unscaled = ((turns - low) / width).clamp(0, 1)
    return unscaled * inv_freq + (1 - unscaled) * inv_freq / scaling.factor


def _yarn(inv_freq: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    num_pairs = len(inv_freq)

    def pair_with_turns(turns: float) -> float:
        """Return the fractional index of the pair that turns `turns` times in the context."""
        inverse_radians = scaling.original_context / (turns * 2 * math.pi)
        return num_pairs * math.log(inverse_radians) / math.log(theta)

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low if high != low else 0.001  # no ramp, and no division by zero
    scaled = ((torch.arange(num_pairs) - low) / width).clamp(0, 1)
    return scaled * inv_freq / scaling.factor + (1 - scaled) * inv_freq


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor by which YaRN or LongRoPE multiplies cos and sin; 1 for other scalings."""
    scaling = rope.scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongRopeScaling) else 1.0


def rotation(
    positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> CosSin:
    """Return cos and sin [T, 1, D] of the rotary angles at positions [T] int64, times `factor`.

    The first half of sin is negated, as `rotate` expects. The angles are computed in float32 for
    every dtype, because bfloat16 cannot represent large positions exactly.
    """
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos() * factor, angles.sin() * factor
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos[:, None].to(dtype), sin[:, None].to(dtype)


def turned_by_axes(turns: Sequence[CosSin], axes: Sequence[int]) -> CosSin:
    """Return cos and sin [T, 1, D] in which each pair is turned by the positions of its own axis.

    turns   cos and sin of the positions of each axis
    axes    [D / 2]: the axis of each pair
    """
    cos, sin = (part.clone() for part in turns[0])
    columns = torch.tensor([*axes, *axes], device=cos.device)
    for axis, (of_cos, of_sin) in enumerate(turns):
        found = (columns == axis).nonzero()[:, 0]
        cos[..., found], sin[..., found] = of_cos[..., found], of_sin[..., found]
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, H, D], rotated by the cos and sin that `rotation` returned."""
    # `roll` swaps the two halves of each head. The minus sign of one half is in sin.
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
