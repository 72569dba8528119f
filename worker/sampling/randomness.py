"""Random numbers without a generator: u = hash(seed, position, draw).

There is no generator state to save at preemption, to reset, or to leak. The number drawn for a
position is the same in every batch, after every preemption, and on every rank and device. The hash
is three rounds of the SplitMix64 finaliser, one per word of the key, in wrapping 64-bit integers.

`draw` counts the random numbers of one position; the sampler uses only number 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1
UNIFORM_BITS = 53


def hash_words(seeds: Tensor, positions: Tensor, draw: int = 0) -> Tensor:
    """Return hashes [N] int64 of seeds and positions [N] int64. All 64 bits are well mixed.

    draw   which of the random numbers of a position, counted from 0
    """
    state = _mix(seeds + _signed(GAMMA))
    state = _mix((state ^ positions) + _signed(GAMMA))
    return _mix((state ^ draw) + _signed(GAMMA))


def uniform(seeds: Tensor, positions: Tensor, draw: int = 0) -> Tensor:
    """Return uniform random numbers [N] float64 in [0, 1), multiples of 2**-53. The arguments are
    those of `hash_words`."""
    bits = _shift(hash_words(seeds, positions, draw), 64 - UNIFORM_BITS)
    return bits.to(torch.float64) * 2.0**-UNIFORM_BITS


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(MIX_2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically. int64's own shift copies the sign bit, so the copies are masked
    away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the bits of the unsigned `word`."""
    return word - (1 << 64) if word >> 63 else word
