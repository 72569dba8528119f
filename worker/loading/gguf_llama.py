"""Reads the weights of GGUF files with the llama architecture, as numbers or as quantised blocks.

llama.cpp's converter interleaves the two halves of each query and key head, because its rotary
embedding rotates neighbouring items. This module reverses the interleaving, so a model has the same
layout as from safetensors.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.loading.gguf_file import GGMLType, GGUFFile
from worker.loading.gguf_header import hf_names
from worker.loading.quant_blocks import BLOCK_WEIGHTS, BlockKind, QuantBlocks, dequantized
from worker.models.config import LlamaConfig

PIECE_ITEMS = 1 << 18
"""Numbers dequantised at once: few enough for the CPU's caches, but enough to hide the cost of the
Python loop."""
PLAIN_DTYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}


class GGUFWeights:
    """A WeightSource over a GGUF file. It dequantises piece by piece, directly into the target."""

    def __init__(self, file: GGUFFile, config: LlamaConfig) -> None:
        self._file = file
        self._config = config
        self._gguf_names = hf_names(file)

    def read_into(self, name: str, target: Tensor) -> None:
        heads = self._interleaved_heads(name)
        if not heads:
            read_tensor(self._file, self._gguf_names[name], target)
            return
        whole = torch.empty(target.shape, dtype=torch.float32)
        read_tensor(self._file, self._gguf_names[name], whole)
        half = self._config.head_dim // 2
        target.view(heads, 2, half, -1).copy_(whole.view(heads, half, 2, -1).transpose(1, 2))

    def blocks(self, name: str) -> QuantBlocks | None:
        info = self._file.tensors[self._gguf_names[name]]
        if info.kind.name not in BlockKind.__members__:
            return None
        raw = self._file.raw(self._gguf_names[name]).reshape(
            info.shape[0], info.shape[1] // BLOCK_WEIGHTS, -1
        )
        if heads := self._interleaved_heads(name):
            half = self._config.head_dim // 2
            raw = raw.reshape(heads, half, 2, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape)
        return QuantBlocks(BlockKind[info.kind.name], raw)

    def _interleaved_heads(self, name: str) -> int:
        """Return the number of heads if the tensor's heads are interleaved, else 0."""
        if ".q_proj." in name:
            return self._config.num_heads
        return self._config.num_kv_heads if ".k_proj." in name else 0


def read_tensor(file: GGUFFile, name: str, target: Tensor) -> None:
    """Dequantise a tensor into `target`, a contiguous tensor with the same number of items."""
    kind, raw, flat = file.tensors[name].kind, file.raw(name), target.view(-1)
    if kind in PLAIN_DTYPES:
        flat.copy_(torch.from_numpy(raw).view(PLAIN_DTYPES[kind]))
        return
    block_items, block_bytes = kind.block
    step = PIECE_ITEMS // block_items
    blocks = raw.reshape(-1, block_bytes)
    for first in range(0, len(blocks), step):
        # A damaged scale gives infinities or NaN. Numpy's warnings about them are silenced here,
        # because a request fails anyway if its logits are not finite.
        with np.errstate(all="ignore"):
            values = _dequantized(blocks[first : first + step], kind)
        flat[first * block_items :][: values.size].copy_(torch.from_numpy(values))


def _dequantized(blocks: NDArray[np.uint8], kind: GGMLType) -> NDArray[np.float32]:
    """Return the numbers in the blocks [N, bytes of a block] as a flat array."""
    if kind.name in BlockKind.__members__:
        return dequantized(BlockKind[kind.name], blocks).reshape(-1)
    from gguf.constants import GGMLQuantizationType  # imported here: slow, and rarely needed
    from gguf.quants import dequantize

    # One long row is fast, because the package loops over rows in Python, 16 at a time.
    row: NDArray[np.float32]
    (row,) = dequantize(blocks.reshape(1, -1), GGMLQuantizationType(kind))
    return row
