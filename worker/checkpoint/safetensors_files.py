"""Finds a directory's safetensors files and reads their headers. Needs no torch."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from worker.errors import FETCH_AGAIN, UnusableModel
from worker.spec.fields import parsed_json, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per number of the supported types."""
QUANTIZED_BYTES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I32": 4, "I64": 8}
"""Bytes per number of types that only quantised layers have."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors of a matrix in MXFP4 (mxfp4.py), of type U8."""
BLOCK_BYTES, BLOCK_NUMBERS = 16, 32
"""Bytes of a block of MXFP4 without its scale, and the numbers in it."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HEADER_SIZE_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_DIMS = 8
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored, and its type and shape."""

    path: Path
    #: The tensor's name in the file.
    name: str
    dtype: str
    shape: tuple[int, ...]
    #: Offset of the first byte in the file.
    begin: int
    #: Offset after the last byte.
    end: int


Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Sizes = Annotated[list[Size], msgspec.Meta(max_length=MAX_DIMS)]


class _Entry(msgspec.Struct, frozen=True):
    """A header's entry for one tensor. Its offsets count from the end of the header."""

    dtype: str
    shape: Sizes
    data_offsets: tuple[Size, Size]


class SafetensorsFiles:
    """The tensors in a model's safetensors files.

    rename   returns the name by which a tensor of the files is known here; None: it is left out

    The constructor raises UnusableModel if a file is damaged or truncated.
    """

    def __init__(self, paths: list[Path], rename: Callable[[str], str | None] = str) -> None:
        self.paths = paths
        self.tensors: dict[str, StoredTensor] = {}
        #: Number of tensors that were left out.
        self.num_left_out = 0
        for path in paths:
            for stored, tensor in _tensors(path).items():
                name = rename(stored)
                if name is None:
                    self.num_left_out += 1
                elif name in self.tensors:
                    raise UnusableModel(f"tensor {stored!r} is in the files twice")
                else:
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

    def content(self, name: str) -> bytes:
        """Return a copy of the tensor's bytes."""
        stored = self.tensors[name]
        with stored.path.open("rb") as file:
            file.seek(stored.begin)
            return file.read(stored.end - stored.begin)


def find_packed(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of each matrix that is stored in MXFP4. The name lacks the suffix
    (BLOCKS or SCALES) of the matrix's two tensors.

    Raises UnusableModel if the scales of a matrix are missing, or if they do not fit its blocks.
    """
    found = {}
    for whole, blocks in tensors.items():
        name = whole.removesuffix(BLOCKS)
        if name == whole or blocks.dtype != "U8":
            continue
        scales = tensors.get(name + SCALES)
        if scales is None:
            raise UnusableModel(
                f"tensor {name + SCALES!r} is missing from the files", remedy=FETCH_AGAIN
            )
        if scales.dtype != "U8" or blocks.shape != (*scales.shape, BLOCK_BYTES):
            raise UnusableModel(
                f"{whole} has shape {blocks.shape}, its scales {scales.shape}: this is not MXFP4"
            )
        found[name] = (*scales.shape[:-1], sum(scales.shape[-1:]) * BLOCK_NUMBERS)
    return found


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of the directory, sorted by name: the single file, or those that
    the index lists. Raises UnusableModel if there are none, or if one of them is missing."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        return _shards(path)
    if any(file.suffix in PICKLES for file in path.iterdir()):
        raise UnusableModel(
            f"{path} holds weights as pickle files, which can run code when they are read",
            remedy="convert them to safetensors",
        )
    raise UnusableModel(f"{path} holds neither {SINGLE} nor {INDEX}", remedy=FETCH_AGAIN)


def _shards(path: Path) -> list[Path]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnusableModel(f"{path / INDEX} has no weight_map", remedy=FETCH_AGAIN)
    names = {str(name) for name in weight_map.values()}
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnusableModel(
                f"{path / INDEX} names {name!r}, which is not a safetensors file of the directory"
            )
        if not (path / name).is_file():
            raise UnusableModel(f"{path / name} is missing", remedy=FETCH_AGAIN)
    return [path / name for name in sorted(names)]


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, after checking its header against the file's size."""
    file_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(HEADER_SIZE_BYTES), "little")
            start = HEADER_SIZE_BYTES + size
            if size > MAX_HEADER_BYTES or start > file_bytes:
                raise damaged(path, "its header extends past the end of the file")
            header = parsed_json(file.read(size), is_strict=True)
    except OSError as error:
        raise damaged(path, str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise damaged(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _is_map_of_strings(metadata):
        raise damaged(path, "its __metadata__ is not an object of strings")
    found = {name: _stored(path, name, entry, start) for name, entry in header.items()}
    end = start
    for tensor in sorted(found.values(), key=lambda tensor: tensor.begin):
        if tensor.begin != end:
            raise damaged(path, "its tensors overlap, or leave gaps")
        end = tensor.end
    if end != file_bytes:
        raise damaged(path, f"its tensors end at byte {end:,}, the file at {file_bytes:,}")
    return found


def _is_map_of_strings(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        stored = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise damaged(path, f"the header's entry of {name!r}: {error}") from error
    begin, end = stored.data_offsets
    num_bytes = end - begin
    item_bytes = (DTYPE_BYTES | QUANTIZED_BYTES).get(stored.dtype)
    if num_bytes < 0 or (item_bytes and num_bytes != item_bytes * math.prod(stored.shape)):
        raise damaged(path, f"the size of {name!r} does not match its shape")
    return StoredTensor(path, name, stored.dtype, tuple(stored.shape), start + begin, start + end)


def damaged(path: Path, reason: str) -> UnusableModel:
    """Return the error of a safetensors file that cannot be read."""
    return UnusableModel(f"{path} is damaged or truncated: {reason}", remedy=FETCH_AGAIN)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def check_kinds(kinds: dict[str, str], supported: Iterable[str]) -> None:
    for name, kind in kinds.items():
        if kind not in supported:
            raise UnusableModel(f"{name} has dtype {kind}; supported: {', '.join(supported)}")
