"""Reads the weights of Hugging Face directories. Executes no code that a directory contains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from worker.loading.quant_blocks import QuantBlocks
from worker.loading.quantized_layers import QuantizedLayer
from worker.loading.quantized_weights import QuantizedMatrix
from worker.loading.safetensors_files import SafetensorsFiles

BYTES = {torch.float8_e4m3fn: torch.uint8, torch.int32: torch.uint32}
"""Types that are read as others, because numpy lacks them or their bits are needed."""


class SafetensorsWeights:
    """A WeightSource over safetensors files, from which each tensor is loaded when it is read.

    quantized   the quantised layers, by the name of the weight
    """

    def __init__(
        self, files: SafetensorsFiles, quantized: Mapping[str, QuantizedLayer] | None = None
    ) -> None:
        opened: dict[Any, Any] = {path: safe_open(path, framework="pt") for path in files.paths}
        self._files = {name: opened[tensor.path] for name, tensor in files.tensors.items()}
        self._quantized = quantized or {}

    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        if name in self._quantized:
            for first, values in self._matrix(name).pieces():
                target[first : first + len(values)].copy_(torch.from_numpy(values))
            return
        file = self._files[name]
        target.copy_(file.get_tensor(name) if index is None else file.get_slice(name)[index])

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        return self._matrix(name).blocks() if name in self._quantized else None

    def _matrix(self, name: str) -> QuantizedMatrix:
        return QuantizedMatrix(self._quantized[name], self._array)

    def _array(self, name: str) -> NDArray[Any]:
        """Return a tensor of a quantised layer: floats as float32, but those of 8 bits as bytes."""
        tensor: Tensor = self._files[name].get_tensor(name)
        if tensor.dtype in BYTES:
            tensor = tensor.view(BYTES[tensor.dtype])
        elif tensor.is_floating_point():
            tensor = tensor.to(torch.float32)
        array: NDArray[Any] = np.asarray(tensor)
        return array
