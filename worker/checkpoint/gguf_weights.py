"""Reads the weights of GGUF files: dequantised, or as quantised blocks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.checkpoint.gguf_file import GGMLType, GGUFFile
from worker.checkpoint.pinned_ring import Copy, copy_tensor
from worker.checkpoint.quant_blocks import BlockKind, QuantBlocks, dequantized

PIECE_ITEMS = 1 << 18
"""Numbers dequantised at once: few enough for the CPU's caches, but enough to hide the cost of the
Python loop."""
PLAIN_DTYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}


OWN_KINDS = ("Q4_0", "Q4_1", "Q8_0")
"""Types that are dequantised without the package `gguf`, whose import is slow."""


class GGUFWeights:
    """A `WeightSource` (weights.py) that reads a GGUF file. It dequantises PIECE_ITEMS numbers at a
    time. `copy` copies them to the target."""

    def __init__(self, file: GGUFFile, copy: Copy = copy_tensor) -> None:
        self._file = file
        self._copy = copy

    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        read_tensor(self._file, name, target, index, self._copy)

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        info = self._file.tensors[name]
        if info.kind.name not in BlockKind.__members__:
            return None
        kind, (rows, columns) = BlockKind[info.kind.name], info.shape[-2:]
        raw = _raw(self._file, name, index)
        return QuantBlocks(kind, raw.reshape(rows, columns // kind.weights, -1))


def read_tensor(
    file: GGUFFile,
    name: str,
    target: Tensor,
    index: int | None = None,
    copy: Copy = copy_tensor,
) -> None:
    """Dequantise the tensor `name`, or its item `index` of the first axis, into `target`, a
    contiguous tensor with the same number of items."""
    kind, raw, flat = file.tensors[name].kind, _raw(file, name, index), target.view(-1)
    if kind in PLAIN_DTYPES:
        copy(flat, torch.from_numpy(raw).view(PLAIN_DTYPES[kind]))
        return
    block_items, block_bytes = kind.block
    step = PIECE_ITEMS // block_items
    blocks = raw.reshape(-1, block_bytes)
    for first in range(0, len(blocks), step):
        # A damaged scale gives infinities or NaN. Numpy's warnings about them are silenced here,
        # because a request fails anyway if its logits are not finite.
        with np.errstate(all="ignore"):
            values = _dequantized(blocks[first : first + step], kind)
        copy(flat[first * block_items :][: values.size], torch.from_numpy(values))


def _raw(file: GGUFFile, name: str, index: int | None) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, or of its item `index` of the first axis."""
    raw = file.raw(name)
    return raw if index is None else raw.reshape(file.tensors[name].shape[0], -1)[index]


def _dequantized(blocks: NDArray[np.uint8], kind: GGMLType) -> NDArray[np.float32]:
    """Return the numbers in the blocks [N, bytes of a block] as a flat array."""
    if kind.name in OWN_KINDS:
        return dequantized(BlockKind[kind.name], blocks).reshape(-1)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # One long row is fast, because the package loops over rows in Python, 16 at a time.
    row: NDArray[np.float32]
    (row,) = dequantize(blocks.reshape(1, -1), GGMLQuantizationType(kind))
    return row
