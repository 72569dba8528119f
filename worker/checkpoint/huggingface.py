"""Reads the weights of Hugging Face directories. Executes no code that a directory contains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.checkpoint import mxfp4
from worker.checkpoint.pinned_ring import Copy, copy_tensor
from worker.checkpoint.quant_blocks import BLOCK_WEIGHTS, BlockKind, QuantBlocks
from worker.checkpoint.quantized_layers import QuantizedLayer
from worker.checkpoint.quantized_weights import QuantizedMatrix
from worker.checkpoint.safetensors_files import (
    BLOCK_BYTES,
    BLOCKS,
    SCALES,
    SafetensorsFiles,
    damaged,
)
from worker.spec.share import Box

PIECE_BLOCKS = 1 << 13
"""Blocks dequantised at once: few enough for the CPU's caches."""

BYTES = {torch.float8_e4m3fn: torch.uint8, torch.int32: torch.uint32}
"""Type -> the type as which its bytes are read. numpy has no float8, and an int32 holds packed
integers, which are unpacked as unsigned."""


class SafetensorsWeights:
    """A `WeightSource` (weights.py) that reads safetensors files. A tensor is loaded when it is
    read.

    quantized   name of a weight -> its layer, for the layers that `quantization_config` describes
    copy        copies what was read to the target

    A name that is neither in `quantized` nor in the files names a matrix in MXFP4. The files store
    the matrix as two tensors, whose names end in BLOCKS and SCALES.

    The constructor raises UnusableModel if the safetensors library refuses a file.
    """

    def __init__(
        self,
        files: SafetensorsFiles,
        quantized: Mapping[str, QuantizedLayer] | None = None,
        copy: Copy = copy_tensor,
    ) -> None:
        opened = {path: _opened(path) for path in files.paths}
        self._files = {name: opened[tensor.path] for name, tensor in files.tensors.items()}
        #: Name of a tensor -> its name in its file.
        self._stored = {name: tensor.name for name, tensor in files.tensors.items()}
        self._quantized = quantized or {}
        self._copy = copy

    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        if name in self._quantized:
            for first, values in self._matrix(name).pieces():
                self._copy(target[first : first + len(values)], torch.from_numpy(values))
        elif name in self._files:
            found = self._read(name, index)
            # Some vectors are stored with further axes of one item.
            self._copy(target, found.view(target.shape) if target.dim() == 1 else found)
        else:
            self._read_mxfp4(name, target, index)

    def read_box(self, name: str, target: Tensor, box: Box) -> bool:
        if name in self._quantized or name not in self._files:
            return False
        self._copy(target, self._slice(name)[box.slices])
        return True

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        if name in self._quantized:
            return self._matrix(name).blocks()
        if name in self._files:
            return None
        blocks, scales = self._mxfp4(name, index)
        raw = mxfp4.gguf_blocks(blocks, scales)
        rows = self._read(name + SCALES, index).shape[0]
        return QuantBlocks(BlockKind.MXFP4, raw.reshape(rows, -1, raw.shape[1]))

    def _read_mxfp4(self, name: str, target: Tensor, index: int | None) -> None:
        blocks, scales = self._mxfp4(name, index)
        rows = target.view(-1, BLOCK_WEIGHTS)
        for first in range(0, len(blocks), PIECE_BLOCKS):
            piece = slice(first, first + PIECE_BLOCKS)
            values = mxfp4.values(mxfp4.integers(blocks[piece]), scales[piece])
            self._copy(rows[piece], torch.from_numpy(values))

    def _mxfp4(self, name: str, index: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the blocks [N, 16] and scales [N] of a matrix in MXFP4."""
        blocks = self._read(name + BLOCKS, index).reshape(-1, BLOCK_BYTES)
        return blocks.numpy(), self._read(name + SCALES, index).reshape(-1).numpy()

    def _read(self, name: str, index: int | None) -> Tensor:
        found: Tensor = (
            self._files[name].get_tensor(self._stored[name])
            if index is None
            else self._slice(name)[index]
        )
        return found

    def _slice(self, name: str) -> Any:
        """Return a safetensors slice of a tensor. Indexing it reads only the part that is
        indexed."""
        return self._files[name].get_slice(self._stored[name])

    def _matrix(self, name: str) -> QuantizedMatrix:
        return QuantizedMatrix(self._quantized[name], self._array)

    def _array(self, name: str) -> NDArray[Any]:
        """Return a tensor of a quantised layer: int32 as uint32, float8_e4m3fn as its bytes, other
        floats as float32."""
        tensor = self._read(name, None)
        if tensor.dtype in BYTES:
            tensor = tensor.view(BYTES[tensor.dtype])
        elif tensor.is_floating_point():
            tensor = tensor.to(torch.float32)
        array: NDArray[Any] = np.asarray(tensor)
        return array


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise damaged(path, str(error)) from error
