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

    def read_into(self, name: str, target: Tensor) -> None:
        target.copy_(self._files[name].get_tensor(name))

    def blocks(self, name: str) -> QuantBlocks | None:
        return None
