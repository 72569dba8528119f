"""MXFP4: blocks of 32 four-bit numbers that share a power of two as their scale.

A code of four bits stands for a number of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, or one of their
negatives. A block's scale is one byte, the exponent plus 127 (OCP Microscaling Formats).

Safetensors files store a matrix as two byte tensors, whose names end in `_blocks` [..., K, 16] and
`_scales` [..., K]. Byte j of a block holds code 2 j in its low half and code 2 j + 1 in its high
half. In a GGUF file, each block starts with its scale, and byte j after the scale holds the codes j
and j + 16.

Legend: N blocks, K blocks in a row of a matrix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int8]
Floats = NDArray[np.float32]
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Code -> twice its number."""
PAIRS = np.stack([np.tile(DOUBLED, 16), np.repeat(DOUBLED, 16)], axis=1).view(np.uint16)[:, 0]
"""Byte -> two bytes: twice the numbers of its low half and of its high half."""


def integers(blocks: Bytes) -> Integers:
    """Return twice the E2M1 numbers [N, 32] of blocks [N, 16] as safetensors store them, before
    their scales are applied. Doubled, all of them are integers."""
    return np.take(PAIRS, blocks).view(np.int8)


def values(doubled: Integers, scales: Bytes) -> Floats:
    """Return the numbers [N, 32]: half of `doubled` [N, 32], which `integers` returned, times the
    scales [N]."""
    with np.errstate(all="ignore"):
        return _units(scales)[:, None] * doubled


def gguf_blocks(blocks: Bytes, scales: Bytes) -> Bytes:
    """Convert blocks [N, 16] and scales [N] of safetensors to GGUF blocks [N, 17]."""
    raw = np.empty((len(blocks), 1 + blocks.shape[1]), np.uint8)
    raw[:, 0] = scales
    # The codes 2 j and 2 j + 1 of the first half meet those of the second half.
    first, second = blocks[:, :8], blocks[:, 8:]
    raw[:, 1::2] = first & 15 | second << 4
    raw[:, 2::2] = first >> 4 | second & 0xF0
    return raw


def _units(scales: Bytes) -> Floats:
    """Return half of each scale [N] as a number, because `integers` doubles the values."""
    return np.ldexp(np.float32(1), scales.astype(np.int32) - 128)
