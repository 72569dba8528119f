"""Hugging Face model directories: JSON beside safetensors. Nothing in them is ever executed."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.loading.blocks import Blocks
from worker.loading.directory_text import directory_text
from worker.loading.errors import UnusableModel
from worker.loading.fields import Fields, read_json
from worker.loading.files import ModelFiles
from worker.models.config import llama_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def read_directory(path: Path) -> ModelFiles:
    """Raises UnusableModel, naming what is missing, damaged or not supported."""
    config_json = read_json(path / "config.json")
    config = llama_config(config_json)
    paths = weight_files(path)
    text = directory_text(path, Fields(config_json, "config.json"), config.vocab_size)
    return ModelFiles(path.resolve().name, config, SafetensorsWeights(paths), text, paths)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of the directory, sorted by name."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        return _shards(path)
    if any(file.suffix in PICKLES for file in path.iterdir()):
        raise UnusableModel(
            f"{path} holds weights as pickle files, which can run code when they are read; "
            "convert them to safetensors"
        )
    raise UnusableModel(f"{path} holds neither {SINGLE} nor {INDEX}")


def _shards(path: Path) -> list[Path]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnusableModel(f"{path / INDEX} has no weight_map")
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnusableModel(f"{path / INDEX} names {name!r}, which is no file of the directory")
        if not (path / name).is_file():
            raise UnusableModel(f"{path / name} is missing")
    return [path / name for name in sorted(names)]


class SafetensorsWeights:
    """A WeightSource over one or more files, mapped; only what is read is touched."""

    def __init__(self, paths: list[Path]) -> None:
        self._file_of: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UnusableModel(f"{path} is damaged or truncated: {error}") from error
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                if name in self._file_of:
                    raise UnusableModel(f"tensor {name!r} is in two files")
                self._file_of[name] = file

    def names(self) -> Set[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read_into(self, name: str, target: Tensor) -> None:
        dtype = self._file_of[name].get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise UnusableModel(f"{name} has dtype {dtype}; supported: {', '.join(DTYPES)}")
        target.copy_(self._file_of[name].get_tensor(name))

    def blocks(self, name: str) -> Blocks | None:
        return None
