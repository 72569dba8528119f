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
    """Stack the parts by rows. Return None if one is missing or not sound, or if kinds differ."""
    found = [part for part in parts if part is not None and part.is_sound]
    if len(found) < len(parts) or len({part.kind for part in found}) != 1:
        return None
    return QuantBlocks(found[0].kind, np.concatenate([part.raw for part in found]))


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
