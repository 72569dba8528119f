"""Quantises numbers to the K-quants Q4_K, Q5_K and Q6_K, whose blocks hold 256 weights.

The layouts of the blocks are those of ggml-common.h in llama.cpp. As in llama.cpp, several scales
are tried for each sub-block, and the one with the least weighted squared error is used.

Legend: N blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SUPER_BLOCK = 256
TINY = np.float32(1e-30)
SIX_BITS = np.float32(63)


def q4_k(values: Floats) -> Bytes:
    """Return Q4_K blocks [N, 144] of numbers [N, 256]."""
    heads, codes = _affine_blocks(values, top=15)
    halves = codes.reshape(-1, 4, 2, 32)
    nibbles = halves[:, :, 0] | halves[:, :, 1] << 4
    return np.concatenate([heads, nibbles.reshape(-1, 128)], axis=1)


def q5_k(values: Floats) -> Bytes:
    """Return Q5_K blocks [N, 176] of numbers [N, 256]."""
    heads, codes = _affine_blocks(values, top=31)
    halves = (codes & 15).reshape(-1, 4, 2, 32)
    nibbles = halves[:, :, 0] | halves[:, :, 1] << 4
    # Bit b of byte i is the fifth bit of weight i of sub-block b.
    fifth = (codes >> 4).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(fifth, axis=1)
    return np.concatenate([heads, high, nibbles.reshape(-1, 128)], axis=1)


def q6_k(values: Floats) -> Bytes:
    """Return Q6_K blocks [N, 210] of numbers [N, 256]. A block has sixteen sub-blocks of 16, each
    with a scale of eight bits, which is multiplied by the block's float16 scale."""
    subs = values.reshape(-1, 16, 16)
    scale = _symmetric_scale(subs)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    whole = (largest / np.float32(-128)).astype(np.float16)
    unit = whole.astype(np.float32)
    steps = np.clip(np.rint(_divided(scale, unit)), -128, 127).astype(np.int8)
    size = unit[:, :, None] * steps[:, :, None]
    codes = (np.clip(np.rint(_divided(subs, size)), -32, 31) + 32).astype(np.uint8)
    # Two halves of 128, each with four rows of 32: low nibbles of rows 0 and 2, and of 1 and 3,
    # share bytes; the two high bits of all four rows share a byte.
    rows = codes.reshape(-1, 2, 4, 32)
    low = (rows[:, :, :2] & 15) | (rows[:, :, 2:] & 15) << 4
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(rows >> 4 << shifts, axis=2)
    parts = (low.reshape(-1, 128), high.reshape(-1, 64), steps.view(np.uint8))
    return np.concatenate([*parts, whole.view(np.uint8)], axis=1)


def _affine_blocks(values: Floats, top: int) -> tuple[Bytes, Bytes]:
    """Return the first 16 bytes of the blocks, and the integers [N, 256] up to `top`.

    weight = scale * integer - minimum. The scale and the minimum of a sub-block of 32 are six-bit
    multiples of the block's own scale and minimum, which are float16.
    """
    subs = values.reshape(-1, 8, 32)
    scale, minimum = _affine_scale(subs, top)
    units, steps = [], []
    for each in (scale, minimum):
        unit = (each.max(axis=1, keepdims=True) / SIX_BITS).astype(np.float16)
        units.append(unit)
        found = np.rint(_divided(each, unit.astype(np.float32)))
        steps.append(np.clip(found, 0, 63).astype(np.uint8))
    size, low = (
        (unit.astype(np.float32) * step)[:, :, None]
        for unit, step in zip(units, steps, strict=True)
    )
    codes = np.clip(np.rint(_divided(subs + low, size)), 0, top).astype(np.uint8)
    heads = np.concatenate([units[0].view(np.uint8), units[1].view(np.uint8)], axis=1)
    return np.concatenate([heads, _packed_six_bits(*steps)], axis=1), codes.reshape(-1, SUPER_BLOCK)


def _packed_six_bits(scale: Bytes, minimum: Bytes) -> Bytes:
    """Return 12 bytes of scales [N, 8] and minima [N, 8] (unpacked in csrc/pack.h)."""
    low = (scale[:, :4] & 63) | scale[:, 4:] >> 4 << 6
    middle = (minimum[:, :4] & 63) | minimum[:, 4:] >> 4 << 6
    high = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    return np.concatenate([low, middle, high], axis=1)


def _affine_scale(subs: Floats, top: int) -> tuple[Floats, Floats]:
    """Return scale and minimum, both at least zero, of each sub-block [N, 8, 32].

    Each candidate scale gives integers. A weighted linear regression then finds the best scale and
    minimum for these integers. Large numbers weigh more.
    """
    mean_square = np.sqrt((subs * subs).mean(axis=2, keepdims=True))
    weight = mean_square + np.abs(subs)
    low, high = np.minimum(subs.min(axis=2, keepdims=True), 0), subs.max(axis=2, keepdims=True)
    extent = np.maximum(high - low, TINY)
    best_scale, best_low = extent / np.float32(top), low
    best_error = np.full_like(low, np.inf)
    sum_w, sum_x = weight.sum(axis=2, keepdims=True), (weight * subs).sum(axis=2, keepdims=True)
    for change in np.arange(-0.8, 0.9, 0.2, dtype=np.float32):
        codes = np.clip(np.rint((subs - low) * ((top + change) / extent)), 0, top)
        weighted = weight * codes
        sum_l = weighted.sum(axis=2, keepdims=True)
        sum_ll = (weighted * codes).sum(axis=2, keepdims=True)
        sum_xl = (weighted * subs).sum(axis=2, keepdims=True)
        determinant = sum_w * sum_ll - sum_l * sum_l
        scale = _divided(sum_w * sum_xl - sum_x * sum_l, determinant)
        offset = _divided(sum_ll * sum_x - sum_l * sum_xl, determinant)
        # Without a minimum below zero, only the scale is fitted.
        scale = np.where(offset > 0, _divided(sum_xl, sum_ll), scale)
        offset = np.minimum(offset, 0)
        error = (weight * (scale * codes + offset - subs) ** 2).sum(axis=2, keepdims=True)
        is_better = (error < best_error) & (scale > 0)
        best_error = np.where(is_better, error, best_error)
        best_scale = np.where(is_better, scale, best_scale)
        best_low = np.where(is_better, offset, best_low)
    return best_scale[:, :, 0], -best_low[:, :, 0]


def _symmetric_scale(subs: Floats) -> Floats:
    """Return the scale, of any sign, of each sub-block [N, 16, 16] for integers from -32 to 31."""
    index = np.abs(subs).argmax(axis=2)[:, :, None]
    largest = np.take_along_axis(subs, index, axis=2)
    weight = subs * subs
    best, best_scale = np.full_like(largest, -np.inf), np.zeros_like(largest)
    for change in np.arange(-0.9, 1.0, 0.15, dtype=np.float32):
        codes = np.clip(np.rint(_divided(subs * -(32 + change), largest)), -32, 31)
        weighted = weight * codes
        sum_xl = (weighted * subs).sum(axis=2, keepdims=True)
        sum_ll = (weighted * codes).sum(axis=2, keepdims=True)
        gain = _divided(sum_xl * sum_xl, sum_ll)
        is_better = gain > best
        best = np.where(is_better, gain, best)
        best_scale = np.where(is_better, _divided(sum_xl, sum_ll), best_scale)
    return best_scale[:, :, 0]


def _divided(values: Floats, by: Floats) -> Floats:
    """Return the quotient; zero where `by` is zero."""
    with np.errstate(all="ignore"):
        quotient: Floats = np.where(by == 0, np.float32(0), values / by).astype(np.float32)
    return quotient
