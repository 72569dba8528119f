"""Turns GGUF's other block types into those that the kernels compute with.

    Q4_K                    Q4_1   the same integers; scales and minima are rounded to float16
    Q3_K, Q5_0, IQ4_NL      Q8_0   the same numbers
    MXFP4                   Q8_0   the same numbers, if their halved scales are float16 numbers
    Q2_K, Q5_1, Q5_K,       Q8_0   rounded to 1/254 of a block's largest number, a small part of
    Q6_K, IQ4_XS                   the type's own error

Layouts of the blocks: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from worker.loading.gguf_file import GGMLType
from worker.loading.mxfp4 import gguf_integers, q8_0
from worker.loading.quant_blocks import BLOCK_WEIGHTS, BlockKind, q8_blocks

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
SUPER_BLOCK = 256
"""Weights in a block of a K-quant."""


def _half(raw: Bytes) -> Floats:
    """Return the float16 numbers [N, K] in bytes [N, 2 K]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _repeated(scale: Floats) -> Floats:
    return np.repeat(scale, SUPER_BLOCK // BLOCK_WEIGHTS)


UNITS: dict[GGMLType, Callable[[Bytes], Floats]] = {
    GGMLType.Q5_0: lambda raw: _half(raw[:, :2])[:, 0],
    GGMLType.IQ4_NL: lambda raw: _half(raw[:, :2])[:, 0],
    GGMLType.Q3_K: lambda raw: _repeated(_half(raw[:, -2:])[:, 0]),
}
"""Type -> the numbers of which all weights of a block of 32 are multiples, up to 128 times."""
ROUNDED = frozenset({GGMLType.Q2_K, GGMLType.Q5_1, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.IQ4_XS})


def target(kind: GGMLType) -> BlockKind | None:
    """Return the block type that `kind` is turned into; None if it is not."""
    if kind.name in BlockKind.__members__:
        return BlockKind[kind.name]
    if kind is GGMLType.Q4_K:
        return BlockKind.Q4_1
    return BlockKind.Q8_0 if kind in UNITS or kind in ROUNDED or kind is GGMLType.MXFP4 else None


def reblocked(kind: GGMLType, raw: Bytes, dequantize: Callable[[Bytes, GGMLType], Floats]) -> Bytes:
    """Return the blocks of `target(kind)` [M, bytes], from blocks of `kind` [N, bytes].

    dequantize   returns the numbers of blocks as a flat array

    A scale that is not finite stays so.
    """
    if kind is GGMLType.Q4_K:
        return _q4_k(raw)
    if kind is GGMLType.MXFP4:
        return q8_0(gguf_integers(raw[:, 1:]), raw[:, 0])
    values = dequantize(raw, kind).reshape(-1, BLOCK_WEIGHTS)
    return q8_blocks(values, UNITS[kind](raw) if kind in UNITS else None)


def _q4_k(raw: Bytes) -> Bytes:
    """Return Q4_1 blocks [8 N, 20] of Q4_K blocks [N, 144].

    A block of 256 weights is eight of 32. Each has a scale and a minimum of 6 bits, which multiply
    the block's own; weight = scale * nibble - minimum. Bytes 0 to 31 of the nibbles hold the first
    32 weights in their low halves and the next 32 in their high halves, and so on.
    """
    scale, minimum = _six_bits(raw[:, 4:16])
    with np.errstate(all="ignore"):
        heads = np.stack(
            [_half(raw[:, 0:2]) * scale, -_half(raw[:, 2:4]) * minimum], axis=2
        ).astype(np.float16)
    halves = raw[:, 16:].reshape(-1, 4, 1, 32)
    nibbles = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(-1, 32)
    blocks = np.empty((8 * len(raw), 20), np.uint8)
    blocks[:, :4] = heads.view(np.uint8).reshape(-1, 4)
    blocks[:, 4:] = nibbles[:, :16] | nibbles[:, 16:] << 4
    return blocks


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return the scales [N, 8] and minima [N, 8] that are packed into 12 bytes.

    Bytes 0 to 3 have the first four scales and bytes 4 to 7 the first four minima, in their low six
    bits. Bytes 8 to 11 have the low four bits of the other scales and, above them, of the other
    minima. The two high bits of these are those of bytes 0 to 7.
    """
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=1)
    minimum = np.concatenate([middle & 63, high >> 4 | (middle >> 6) << 4], axis=1)
    return scale, minimum
