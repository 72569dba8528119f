"""Quantised matrices as a GGUF file stores them: in blocks of 32 weights that share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

BLOCK_WEIGHTS = 32
MAX_SCALE = 4096.0
"""Limit of the scales of Q4_0 blocks: the kernels store -8 times the scale as a finite float16."""


class BlockKind(IntEnum):
    """Block types that the kernels compute with directly, numbered as in csrc/packed.h."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2

    @property
    def num_scales(self) -> int:
        """Return how many float16 numbers start a block: a scale, and a minimum in Q4_1."""
        return 2 if self is BlockKind.Q4_1 else 1


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """A quantised matrix."""

    kind: BlockKind
    #: [outputs, inputs / 32, bytes of a block]
    raw: NDArray[np.uint8]

    @property
    def is_sound(self) -> bool:
        """Return whether all scales are finite and small enough for the kernels.

        A matrix that is not sound is dequantised, so that infinities and NaN reach the logits.
        """
        words = self.raw[:, :, : 2 * self.kind.num_scales]
        scales = np.abs(np.ascontiguousarray(words).view(np.float16))
        max_scale = MAX_SCALE if self.kind is BlockKind.Q4_0 else np.inf
        return bool((scales < max_scale).all())


def stacked(parts: list[QuantBlocks | None]) -> QuantBlocks | None:
    """Stack the parts by rows. Return None if one is missing or not sound.

    If their kinds differ, the others are rounded to Q8_0, which is wider than all other kinds.
    """
    found = [part for part in parts if part is not None and part.is_sound]
    if len(found) < len(parts):
        return None
    if len({part.kind for part in found}) > 1:
        found = [_as_q8(part) for part in found]
    return QuantBlocks(found[0].kind, np.concatenate([part.raw for part in found]))


def _as_q8(blocks: QuantBlocks) -> QuantBlocks:
    if blocks.kind is BlockKind.Q8_0:
        return blocks
    rows, groups, size = blocks.raw.shape
    values = dequantized(blocks.kind, blocks.raw.reshape(-1, size))
    return QuantBlocks(BlockKind.Q8_0, q8_blocks(values).reshape(rows, groups, -1))


def q8_blocks(
    values: NDArray[np.float32], unit: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Quantise numbers [N, 32] to Q8_0 blocks [N, 34].

    unit   [N] the scale of each block; None: its largest absolute number / 127, so that no number
           changes by more than 1/254 of it

    Scales are stored as float16. One that is not finite is stored as it is; without `unit`, this
    is so if the block has an infinity or NaN.
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
    """Return the numbers [N, 32] of blocks [N, bytes of a block], bit-equal to those of `gguf`."""
    head = 2 * kind.num_scales
    scales = np.ascontiguousarray(raw[:, :head]).view(np.float16).astype(np.float32)
    if kind is BlockKind.Q8_0:
        return scales * raw[:, head:].view(np.int8)
    integers = np.concatenate([raw[:, head:] & 15, raw[:, head:] >> 4], axis=1).view(np.int8)
    if kind is BlockKind.Q4_0:
        return scales * (integers - np.int8(8))
    return scales[:, :1] * integers + scales[:, 1:]
