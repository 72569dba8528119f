"""Numbers that have the same bits on every device: exponentials and weights, and random numbers and
keys that are made of integers.

Kernels that use them must be launched with EXACT (worker/sampling/row_split.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

LAST_ID = tl.constexpr((1 << 31) - 1)
NAN_ORDER = tl.constexpr((1 << 32) - 1)


@triton.jit
def exp(x):
    """Return exp(x) of float32 x <= 0; 0 below -87 and for NaN.

    It is 2**n * exp(r) with |r| <= ln(2) / 2. All operations round correctly, so the result has the
    same bits on every device; it is within 1 unit in the last place.
    """
    y = tl.where(x >= -87.0, x, -87.0)
    n = tl.floor(y * 1.4426950408889634 + 0.5)
    r = y - n * 0.693359375  # exact: ln(2) in 9 bits, and n in 7
    r = r + n * 2.1219444005469057e-04
    p = r * 0.0013814320470879827 + 0.008368851204697565
    p = p * r + 0.041668401095087036
    p = p * r + 0.16666519522901047
    p = p * r + 0.4999999337300976
    p = p * r * r + r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x >= -87.0, p * power, 0.0)


@triton.jit
def relative_share(x, peak, temperature):
    """Return how likely logits x are, relative to the row's most likely token."""
    return exp(tl.div_rn(x - peak, temperature))


@triton.jit
def weight(share, SCALE: tl.constexpr):
    """Return shares as int64 weights (worker/sampling/exact_probs.py)."""
    return (share * SCALE).to(tl.int64)


@triton.jit
def order(x):
    """Return int64 numbers in [0, 2**32) in the order of float32 x. NaN comes last, and -0 equals
    0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    ascending = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000
    return tl.where(x == x, ascending, NAN_ORDER)


@triton.jit
def ordered(number):
    """Return the float32 whose `order` is `number`."""
    ascending = (number - 0x80000000).to(tl.int32)
    bits = tl.where(ascending < 0, ascending ^ 0x7FFFFFFF, ascending)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def peak_key(x, ids):
    """Return positive int64 keys of logits and their tokens. The largest key has the largest logit,
    and the lowest id among equal ones."""
    return (order(x) << 31) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def key_value(key):
    return ordered(key >> 31)


@triton.jit
def key_token(key):
    return (key & LAST_ID) ^ LAST_ID


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """Return the random number 0 of a position (worker/sampling/randomness.py), float64."""
    state = mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    state = mix((state ^ position.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    state = mix(state + 0x9E3779B97F4A7C15)
    return (state >> 11).to(tl.float64) * (1.0 / (1 << 53))
