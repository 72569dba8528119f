"""The files that hold a model's image encoder: those of a directory here, the mmproj file of a GGUF
file in mmproj.py. Only `EncoderFiles.read` needs torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.checkpoint.safetensors_files import SafetensorsFiles, weight_files
from worker.spec.fields import read_json
from worker.vision.tensor_names import is_of_images, tower_key

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
TEXTS = (CONFIG, "preprocessor_config.json", "processor_config.json")
"""Files that describe an encoder and its preprocessing."""


class EncoderFiles(ABC):
    """The files of an image encoder.

    config   content of config.json
    texts    name -> content of each file of TEXTS that exists
    paths    the files that hold only the encoder
    """

    config: Mapping[str, Any]
    texts: dict[str, bytes]
    paths: list[Path]

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """`tower_key` -> shape of each tensor, from the headers of the files. Raises UnusableModel
        if a file is damaged."""

    @property
    def num_items(self) -> int:
        """Number of weights. Raises UnusableModel if a file is damaged."""
        return sum(map(math.prod, self.shapes.values()))

    @abstractmethod
    def read(self, keys: Container[str]) -> Mapping[str, Tensor]:
        """Return those tensors whose `tower_key` is in `keys`, in float32. Tensors that are
        quantised in safetensors are left out."""


class DirectoryEncoder(EncoderFiles):
    """The encoder of a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = read_json(path / CONFIG)
        self.texts = {n: (path / n).read_bytes() for n in TEXTS if (path / n).is_file()}
        self.paths = []

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        files = SafetensorsFiles(
            weight_files(self._path), lambda name: name if is_of_images(name) else None
        )
        return {tower_key(name): tensor.shape for name, tensor in files.tensors.items()}

    def read(self, keys: Container[str]) -> Mapping[str, Tensor]:
        import torch
        from safetensors import safe_open

        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        found: dict[str, Tensor] = {}
        for file in weight_files(self._path):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    key = tower_key(name)
                    if key in keys and (value := opened.get_tensor(name)).dtype in dtypes:
                        found[key] = value.float()
        return found
