"""Random numbers that have the same bits on every machine and with every version of every library.

Neither torch nor numpy promises the same bits for any distribution, and `torch.randn` gives other
ones on ARM. Here a hash of a seed and of a number's place is made of integer operations alone, and
each later operation has one correctly rounded result.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
UNIT = np.float32(37837)
"""Standard deviation of the sum of four numbers below 2^16: 2^16 / sqrt(3)."""


def hashed(*shape: int, seed: int = 0) -> Hashes:
    """Return random integers of 64 bits: SplitMix64, started at a hash of `seed`. Source: Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators" (2014)."""
    start = _mixed(np.array([seed], np.uint64))
    places = np.arange(1, prod(shape) + 1, dtype=np.uint64)
    return _mixed(start + places * np.uint64(0x9E3779B97F4A7C15)).reshape(shape)


def hashed_normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Return random numbers with a mean of 0 and a deviation of 1, between -3.5 and 3.5. Each is a
    sum of four equally distributed integers, divided once."""
    quarters = hashed(*shape, seed=seed)[..., None].view("<u2").astype(np.int64)
    sums = quarters.sum(-1) - 2 * 0xFFFF
    return sums.astype(np.float32) / UNIT


def hashed_order(count: int, seed: int = 0) -> list[int]:
    """Return the integers below `count` in a random order."""
    return [int(place) for place in np.argsort(hashed(count, seed=seed), kind="stable")]


def _mixed(x: Hashes) -> Hashes:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
