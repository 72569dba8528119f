"""Rotary position embeddings: pair (i, i + D/2) of a head rotates by position * inv_freq[i].

Sines and cosines are computed from positions once per step for all layers, so there is no table of
max_len rows. Legend: T tokens, H heads (queries or keys), D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.models.rope_config import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    RopeConfig,
    YarnScaling,
)


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """Return [D / 2] float32, the radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    match rope.scaling:
        case NoScaling():
            return inv_freq
        case LinearScaling(factor):
            return inv_freq / factor
        case FactorScaling(factors):
            return inv_freq / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(inv_freq, scaling)
        case YarnScaling() as scaling:
            return _yarn(inv_freq, scaling, rope.theta)


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * inv_freq + (1 - kept) * inv_freq / scaling.factor


def _yarn(inv_freq: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    num_pairs = len(inv_freq)

    def pair_with_turns(times: float) -> float:
        wavelength = scaling.original_context / (times * 2 * math.pi)
        return num_pairs * math.log(wavelength) / math.log(theta)

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low if high != low else 0.001  # a vertical ramp
    slowed = ((torch.arange(num_pairs) - low) / width).clamp(0, 1)
    return slowed * inv_freq / scaling.factor + (1 - slowed) * inv_freq


def attention_factor(rope: RopeConfig) -> float:
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0


def rotation(
    positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, D] of the rotary angles at positions [T] int64, times `factor`.

    The first half of sin is negated, as `rotate` expects.

    Angles are float32 in every dtype, because distant positions need the precision.
    """
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos() * factor, angles.sin() * factor
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos[:, None].to(dtype), sin[:, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] by the cos and sin of `rotation`.

    The roll swaps the halves of each head; the sign is in sin.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
