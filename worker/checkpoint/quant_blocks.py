"""Quantised matrices as a GGUF file stores them: in blocks of 32 or 256 weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

BLOCK_WEIGHTS, SUPER_BLOCK = 32, 256
"""Weights in a block, and in a super-block (the K-quants and IQ4_XS)."""
MAX_SCALE = 4096.0
"""Q4_0 scales must be below this: the kernels store -8 times the scale as a finite float16."""
NO_EXPONENT = 255
"""The scale byte that stands for NaN in MXFP4 (OCP Microscaling Formats)."""


class BlockKind(IntEnum):
    """Block types that the kernels compute with directly, numbered as in csrc/pack.h."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2
    Q5_0 = 3
    Q5_1 = 4
    IQ4_NL = 5
    MXFP4 = 6
    Q2_K = 7
    Q3_K = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11
    IQ4_XS = 12

    @property
    def weights(self) -> int:
        """Return the number of weights in a block."""
        return SUPER_BLOCK if self >= BlockKind.Q2_K else BLOCK_WEIGHTS

    @property
    def scale_bytes(self) -> slice:
        """Return which bytes of a block hold its scale: a float16, followed in some types by a
        second float16 (the minimum, or the scale of the minima). In MXFP4, the scale is one byte:
        an exponent."""
        match self:
            case BlockKind.MXFP4:
                return slice(0, 1)
            case BlockKind.Q3_K | BlockKind.Q6_K:
                return slice(-2, None)
            case BlockKind.Q2_K:
                return slice(-4, None)
            case BlockKind.Q4_1 | BlockKind.Q5_1 | BlockKind.Q4_K | BlockKind.Q5_K:
                return slice(0, 4)
            case _:
                return slice(0, 2)


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """A matrix [outputs, inputs] in quantised blocks. A block holds consecutive weights of one
    row."""

    kind: BlockKind
    #: [outputs, blocks of a row, bytes of a block]
    raw: NDArray[np.uint8]

    @property
    def inputs(self) -> int:
        return int(self.raw.shape[1]) * self.kind.weights

    @property
    def is_sound(self) -> bool:
        """Return whether all scales are finite and small enough for the kernels.

        A matrix that is not sound is dequantised, so that infinities and NaN reach the logits.
        """
        scales = np.ascontiguousarray(self.raw[:, :, self.kind.scale_bytes])
        if self.kind is BlockKind.MXFP4:
            return bool((scales < NO_EXPONENT).all())
        words = scales.view(np.uint16)
        # Positive float16 numbers are ordered as their bits are. Infinity and NaN are the largest.
        max_scale = MAX_SCALE if self.kind is BlockKind.Q4_0 else np.inf
        return bool(((words & 0x7FFF) < np.float16(max_scale).view(np.uint16)).all())


def q8_blocks(
    values: NDArray[np.float32], unit: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Quantise numbers [N, 32] to Q8_0 blocks [N, 34].

    unit   [N] the scale of each block; None: the block's largest absolute number / 127, so that
           rounding changes no number by more than 1/254 of the largest

    Scales are stored as float16. If a block has an infinity or NaN and `unit` is None, its scale is
    not finite, so that `is_sound` finds it.
    """
    with np.errstate(all="ignore"):
        if unit is None:
            unit = np.abs(values).max(axis=1) / np.float32(127)
        scales = unit.astype(np.float16)
        multiples = np.rint(values / scales.astype(np.float32)[:, None])
        integers = np.nan_to_num(multiples.clip(-127, 127)).astype(np.int8)
    blocks = np.empty((len(values), 2 + BLOCK_WEIGHTS), np.uint8)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = integers.view(np.uint8)
    return blocks


def dequantized(kind: BlockKind, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers [N, 32] of blocks [N, bytes of a block]. They equal, bit for bit, those
    that the package `gguf` returns.

    kind   Q4_0, Q4_1 or Q8_0
    """
    head = kind.scale_bytes.stop
    scales = np.ascontiguousarray(raw[:, :head]).view(np.float16).astype(np.float32)
    if kind is BlockKind.Q8_0:
        return scales * raw[:, head:].view(np.int8)
    integers = np.concatenate([raw[:, head:] & 15, raw[:, head:] >> 4], axis=1).view(np.int8)
    if kind is BlockKind.Q4_0:
        return scales * (integers - np.int8(8))
    assert kind is BlockKind.Q4_1
    return scales[:, :1] * integers + scales[:, 1:]
