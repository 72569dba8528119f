"""Quantised matrices as stored in a file: blocks of 32 weights with a scale, not dequantised."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

BLOCK_WEIGHTS = 32
MAX_SCALE = 4096.0
"""Limit for blocks without a minimum: the kernels store 8 times the scale as float16."""


class BlockKind(IntEnum):
    """GGUF block types that the kernels compute with directly; numbered as in csrc/packed.h."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2

    @property
    def num_scales(self) -> int:
        """Float16 numbers at the start of a block."""
        return 2 if self is BlockKind.Q4_1 else 1


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """A quantised matrix; raw [outputs, inputs / 32, bytes of a block] uint8."""

    kind: BlockKind
    raw: NDArray[np.uint8]

    @property
    def is_sound(self) -> bool:
        """Return whether all scales are finite and small enough for the kernels. Other matrices are
        dequantised, so that the damage shows in the logits."""
        words = self.raw[:, :, : 2 * self.kind.num_scales]
        scales = np.abs(np.ascontiguousarray(words).view(np.float16))
        max_scale = MAX_SCALE if self.kind is BlockKind.Q4_0 else np.inf
        return bool((scales < max_scale).all())


def stacked(parts: list[QuantBlocks | None]) -> QuantBlocks | None:
    """Stack matrices by rows. Return None if one is missing or not sound, or if kinds differ."""
    found = [part for part in parts if part is not None and part.is_sound]
    if len(found) < len(parts) or len({part.kind for part in found}) != 1:
        return None
    return QuantBlocks(found[0].kind, np.concatenate([part.raw for part in found]))


def dequantized(kind: BlockKind, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Dequantise raw [N, bytes of a block] to [N, 32], bit-equal to the package `gguf`."""
    head = 2 * kind.num_scales
    scales = np.ascontiguousarray(raw[:, :head]).view(np.float16).astype(np.float32)
    if kind is BlockKind.Q8_0:
        return scales * raw[:, head:].view(np.int8)
    integers = np.concatenate([raw[:, head:] & 15, raw[:, head:] >> 4], axis=1).view(np.int8)
    if kind is BlockKind.Q4_0:
        return scales * (integers - np.int8(8))
    return scales[:, :1] * integers + scales[:, 1:]
