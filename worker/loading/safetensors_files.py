"""The safetensors files of a directory: which tensors they hold, and where. Needs no torch."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from worker.loading.errors import UnusableModel
from worker.loading.fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HEADER_SIZE_BYTES = 8
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's bytes are file[begin:end]."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFiles:
    """tensors: name -> where it is. Raises UnusableModel if a file is damaged or truncated."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.tensors: dict[str, StoredTensor] = {}
        for path in paths:
            for name, tensor in _tensors(path).items():
                if name in self.tensors:
                    raise UnusableModel(f"tensor {name!r} is in two files")
                self.tensors[name] = tensor

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same type, shape and bytes."""
        first, second = self.tensors[one], self.tensors[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        size = first.end - first.begin
        with _mapped(first.path) as ones, _mapped(second.path) as others:
            return all(
                ones[first.begin + at : first.begin + min(at + PIECE_BYTES, size)]
                == others[second.begin + at : second.begin + min(at + PIECE_BYTES, size)]
                for at in range(0, size, PIECE_BYTES)
            )


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of the directory, sorted by name."""
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


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file. Its library has checked the header against the file."""
    try:
        with safe_open(path, framework="np"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(HEADER_SIZE_BYTES), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise UnusableModel(f"{path} is damaged or truncated: {error}") from error
    start = HEADER_SIZE_BYTES + size
    return {
        name: StoredTensor(
            path,
            entry["dtype"],
            tuple(entry["shape"]),
            *(start + offset for offset in entry["data_offsets"]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
