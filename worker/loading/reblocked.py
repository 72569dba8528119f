"""Turns GGUF's other block types into Q8_0, with which the kernels compute.

    IQ4_NL          the same numbers
    MXFP4           the same numbers, if their halved scales are float16 numbers
    Q2_K, IQ4_XS    rounded to 1/254 of a block's largest number, a small part of the type's error

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


def _half(raw: Bytes) -> Floats:
    """Return the float16 numbers [N, K] in bytes [N, 2 K]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


UNITS: dict[GGMLType, Callable[[Bytes], Floats]] = {
    GGMLType.IQ4_NL: lambda raw: _half(raw[:, :2])[:, 0],
}
"""Type -> the numbers of which all weights of a block of 32 are multiples, up to 128 times."""
ROUNDED = frozenset({GGMLType.Q2_K, GGMLType.IQ4_XS})


def target(kind: GGMLType) -> BlockKind | None:
    """Return the block type that `kind` is turned into; None if it is not."""
    if kind.name in BlockKind.__members__:
        return BlockKind[kind.name]
    return BlockKind.Q8_0 if kind in UNITS or kind in ROUNDED or kind is GGMLType.MXFP4 else None


def reblocked(kind: GGMLType, raw: Bytes, dequantize: Callable[[Bytes, GGMLType], Floats]) -> Bytes:
    """Return Q8_0 blocks [M, 34] of blocks of `kind` [N, bytes], a type of UNITS or ROUNDED.

    dequantize   returns the numbers of blocks as a flat array

    A scale that is not finite stays so.
    """
    if kind is GGMLType.MXFP4:
        return q8_0(gguf_integers(raw[:, 1:]), raw[:, 0])
    values = dequantize(raw, kind).reshape(-1, BLOCK_WEIGHTS)
    return q8_blocks(values, UNITS[kind](raw) if kind in UNITS else None)
