"""MXFP4: blocks of 32 four-bit numbers that share a power of two as their scale.

A code of four bits is a number of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero. A
block's scale is one byte, the exponent plus 127 (OCP Microscaling Formats).

Safetensors hold a matrix in two tensors of bytes, whose names end in `_blocks` [..., K, 16] and
`_scales` [..., K]. Byte j of a block holds the codes 2 j, in its low half, and 2 j + 1. In a GGUF
file, each block starts with its scale, and byte j of the codes holds the codes j and j + 16.

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
    """Return twice the numbers [N, 32] of the blocks [N, 16] of safetensors."""
    return np.take(PAIRS, blocks).view(np.int8)


def gguf_integers(codes: Bytes) -> Integers:
    """Return twice the numbers [N, 32] of the codes [N, 16] of GGUF blocks."""
    found: Integers = DOUBLED[np.concatenate([codes & 15, codes >> 4], axis=1)]
    return found


def values(doubled: Integers, scales: Bytes) -> Floats:
    """Return the numbers [N, 32] of `doubled` [N, 32] with scales [N]."""
    with np.errstate(all="ignore"):
        return _units(scales)[:, None] * doubled


def q8_0(doubled: Integers, scales: Bytes) -> Bytes:
    """Return Q8_0 blocks [N, 34] of the same numbers, if the halved scales are float16 numbers.

    A smaller one becomes zero, and a larger one infinite.
    """
    raw = np.empty((len(doubled), 2 + doubled.shape[1]), np.uint8)
    with np.errstate(all="ignore"):
        raw[:, :2] = _units(scales).astype(np.float16)[:, None].view(np.uint8)
    raw[:, 2:] = doubled.view(np.uint8)
    return raw


def _units(scales: Bytes) -> Floats:
    """Return half of each scale [N]."""
    return np.ldexp(np.float32(1), scales.astype(np.int32) - 128)
