"""Reads the weights of Hugging Face directories. Executes no code that a directory contains."""

from __future__ import annotations

from typing import Any

from safetensors import safe_open
from torch import Tensor

from worker.loading.quant_blocks import QuantBlocks
from worker.loading.safetensors_files import SafetensorsFiles


class SafetensorsWeights:
    """A WeightSource over safetensors files, from which each tensor is loaded when it is read."""

    def __init__(self, files: SafetensorsFiles) -> None:
        opened: dict[Any, Any] = {path: safe_open(path, framework="pt") for path in files.paths}
        self._files = {name: opened[tensor.path] for name, tensor in files.tensors.items()}

    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        file = self._files[name]
        target.copy_(file.get_tensor(name) if index is None else file.get_slice(name)[index])

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        return None
