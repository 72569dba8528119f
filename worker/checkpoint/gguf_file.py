"""Reads a GGUF file: metadata, tensor table, and the raw bytes of tensors without copying them.

A model may be split into several files, its parts, whose names end with "-00001-of-00003.gguf" and
so on. Only the first part has the metadata of the model.

The file is not trusted: every count, length, offset and size is checked against the file's size
before it is used. The parser reads plain structs from one memory mapping, because reading the
100,000 strings of a tokenizer as numpy views takes seconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.shared.gguf_parts import MAGIC, all_parts, part_of
from worker.errors import FETCH_AGAIN, UnusableModel

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class GGMLType(IntEnum):
    """Number types of tensors, with GGUF's codes.

    The package `gguf` has the same table, but importing the package takes a tenth of the worker's
    start-up time. The package is imported only for types that the worker cannot dequantise itself.
    A test compares the two tables.
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def block(self) -> tuple[int, int]:
        """Return (numbers in a block, bytes of a block). Types that are not quantised have blocks
        of one number."""
        return _BLOCKS[self]

    @property
    def is_readable(self) -> bool:
        """Return whether the worker or the package `gguf` can read numbers of this type."""
        return self not in _UNREADABLE


_UNREADABLE = frozenset(
    {GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64, GGMLType.F64}
    | {GGMLType.Q8_1, GGMLType.Q8_K, GGMLType.Q1_0}
)
_SINGLE = {"I8": 1, "F16": 2, "BF16": 2, "I16": 2, "F32": 4, "I32": 4, "I64": 8, "F64": 8}
_OF_32 = {"MXFP4": 17, "Q4_0": 18, "IQ4_NL": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}
_OF_32 |= {"Q8_1": 40}
_OF_256 = {"IQ1_S": 50, "TQ1_0": 54, "IQ1_M": 56, "IQ2_XXS": 66, "TQ2_0": 66, "IQ2_XS": 74}
_OF_256 |= {"IQ2_S": 82, "Q2_K": 84, "IQ3_XXS": 98, "Q3_K": 110, "IQ3_S": 110, "IQ4_XS": 136}
_OF_256 |= {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q8_K": 292}
_BY_NUMBERS = {1: _SINGLE, 32: _OF_32, 64: {"NVFP4": 36}, 128: {"Q1_0": 18}, 256: _OF_256}
_BLOCKS = {
    GGMLType[name]: (numbers, size)
    for numbers, sizes in _BY_NUMBERS.items()
    for name, size in sizes.items()
}


VERSIONS = (2, 3)
MAX_DIMS = 4
LENGTH = struct.Struct("<Q")
"""The length of a string, before its bytes."""
MIN_STRING_BYTES = LENGTH.size
MIN_PAIR_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
ARCHITECTURE = "general.architecture"
PART = "split.no"
"""Key of the number of a part of a split model, from 0."""
NUM_PARTS, ALL_TENSORS = "split.count", "split.tensors.count"
"""Keys of the numbers of all parts, and of the tensors in all parts."""
TRUNCATED = "the header ends early: the file is truncated"

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""GGUF's scalar type codes -> format characters of the struct module."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type, shape and position of a tensor in the file."""

    kind: GGMLType
    #: In torch's order: the last axis is contiguous.
    shape: tuple[int, ...]
    #: Bytes from the start of the file.
    offset: int
    num_bytes: int
    #: Number of the file that has the tensor, from 0.
    part: int = 0


class GGUFFile:
    """A memory-mapped GGUF file, with the other parts of a split model.

    The constructor raises UnusableModel if the file is not a GGUF file, is truncated, contradicts
    itself, or is not the first part of a split model, or if another part is missing.

    path    the file, or the first part
    paths   all parts
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _Header(_mapped(path), path)
        header.read()
        #: Key -> int, float, bool, str, or a list of them.
        self.metadata = header.metadata
        #: Name -> TensorInfo.
        self.tensors = header.tensors
        self.paths = part_paths(path, self.metadata)
        self._data = [header.data]
        for part, other in enumerate(self.paths[1:], 1):
            self._add(_Header(_mapped(other), other, part), len(self.paths))
        total = self.metadata.get(ALL_TENSORS, len(self.tensors))
        if len(self.paths) > 1 and len(self.tensors) != total:
            raise UnusableModel(
                f"the parts of {path} have {len(self.tensors)} tensors, not {total}",
                remedy=FETCH_AGAIN,
            )

    def _add(self, header: _Header, count: int) -> None:
        """Add the tensors of another part."""
        header.read()
        if (header.metadata.get(PART), header.metadata.get(NUM_PARTS)) != (header.part, count):
            raise header.damaged(f"it is not part {header.part + 1} of {count}")
        for name, info in header.tensors.items():
            if name in self.tensors:
                raise header.damaged(f"an earlier part has the tensor {name!r} too")
            self.tensors[name] = info
        self._data.append(header.data)

    def content(self, name: str) -> bytes:
        """Return a copy of the tensor's bytes."""
        info = self.tensors[name]
        return self._data[info.part][info.offset : info.offset + info.num_bytes]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes in the mapped file as a flat array, without copying them."""
        import numpy as np  # imported here: without it, a header is read three times as fast

        info = self.tensors[name]
        # The mapping is copy-on-write because torch requires writable memory. Nothing writes to it.
        return np.frombuffer(self._data[info.part], np.uint8, info.num_bytes, info.offset)


def part_paths(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Return the paths of all parts of a model: `path` alone if it is not split.

    metadata   those of the file at `path`

    Raises UnusableModel unless `path` is the first part, and has a name from which those of the
    other parts follow.
    """
    count = metadata.get(NUM_PARTS, 1)
    if not isinstance(count, int) or count <= 1:
        return [path]
    part, parts = part_of(path.name), [path.with_name(each) for each in all_parts(path.name)]
    if part is None or part[1] != count:
        raise UnusableModel(
            f"{path} is one of {count} parts of a model, which are found by their names",
            remedy=f"rename it: the first part's name must end with -00001-of-{count:05}.gguf",
        )
    if metadata.get(PART, 0) != 0 or part[0] != 1:
        raise UnusableModel(f"{path} is not the first part", remedy=f"serve {parts[0]} instead")
    for each in parts:
        if not each.is_file():
            raise UnusableModel(
                f"{each} is missing: the model has {count} parts", remedy=FETCH_AGAIN
            )
    return parts


def architecture_at_start(path: Path) -> str | None:
    """Return the architecture that a GGUF file names, even if the file ends within its metadata.

    So a model can be checked when only the first bytes of its file have been downloaded. Return
    None if they do not contain the architecture, or are damaged.
    """
    try:
        return _Header(_mapped(path), path).architecture()
    except UnusableModel:
        return None


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise UnusableModel(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UnusableModel(f"{path} is empty", remedy=FETCH_AGAIN) from error


class _Header:
    """Parses the file's start once, from the magic number to the end of the tensor table.

    part   number of the file among the parts of its model
    """

    def __init__(self, data: mmap.mmap, path: Path, part: int = 0) -> None:
        self.data = data
        self.part = part
        self._path = path
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def read(self) -> None:
        """Fill `metadata` and `tensors`."""
        num_tensors, num_pairs = self._counts()
        for _ in range(num_pairs):
            self._read_pair()
        self._read_tensors(num_tensors)

    def architecture(self) -> str | None:
        """Return the architecture without reading the entries after it, which may be missing."""
        _, num_pairs = self._counts()
        for _ in range(num_pairs):
            if self._read_pair() == ARCHITECTURE:
                return str(self.metadata[ARCHITECTURE])
        return None

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of tensors and of metadata entries."""
        if self._take(4) != MAGIC:
            raise UnusableModel(f"{self._path} is not a GGUF file")
        version = self._unsigned(4)
        if version not in VERSIONS:
            raise self.damaged(f"version {version} is not one of {VERSIONS}")
        num_tensors = self._count(8, MIN_TENSOR_BYTES, "tensors")
        return num_tensors, self._count(8, MIN_PAIR_BYTES, "metadata entries")

    def _read_pair(self) -> str:
        """Read a metadata entry and return its key."""
        key = self._string()
        if key in self.metadata:
            raise self.damaged(f"metadata key {key!r} appears twice")
        self.metadata[key] = self._value(self._unsigned(4))
        return key

    def _read_tensors(self, count: int) -> None:
        """Read the tensor table. Its offsets count from the first aligned byte after the table."""
        table = [
            (self._string(), self._shape(), self._unsigned(4), self._unsigned(8))
            for _ in range(count)
        ]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.damaged(f"alignment {alignment!r} is not a power of two")
        start = -(-self._at // alignment) * alignment
        for name, shape, code, offset in table:
            if name in self.tensors:
                raise self.damaged(f"tensor {name!r} appears twice")
            if offset % alignment:
                raise self.damaged(f"tensor {name!r} is not aligned")
            self.tensors[name] = self._tensor(name, shape, code, start + offset)

    def _tensor(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> TensorInfo:
        try:
            kind = GGMLType(code)
        except ValueError:
            raise self.damaged(f"tensor {name!r} has unknown type {code}") from None
        block_items, block_bytes = kind.block
        num_items = 1
        for size in shape:
            num_items *= size
        if shape[-1] % block_items:
            raise self.damaged(f"rows of {name!r} are not whole blocks of {kind.name}")
        num_bytes = num_items // block_items * block_bytes
        if offset + num_bytes > len(self.data):
            raise self.damaged(
                f"tensor {name!r} ends at byte {offset + num_bytes:,}, the file at "
                f"{len(self.data):,}: it is truncated"
            )
        return TensorInfo(kind, shape, offset, num_bytes, self.part)

    def _shape(self) -> tuple[int, ...]:
        num_dims = self._unsigned(4)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.damaged(f"a tensor has {num_dims} dimensions")
        shape = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims))
        if not all(shape):
            raise self.damaged("a tensor is empty")
        return tuple(reversed(shape))

    def _value(self, code: int) -> Any:
        if code == STRING:
            return self._string()
        if code == ARRAY:
            return self._array(self._unsigned(4))
        (value,) = self._scalars(code, 1)
        return value

    def _array(self, code: int) -> list[Any]:
        if code == STRING:
            return self._strings(self._count(8, MIN_STRING_BYTES, "strings"))
        return list(self._scalars(code, self._count(8, self._scalar_bytes(code), "numbers")))

    def _scalars(self, code: int, count: int) -> tuple[Any, ...]:
        taken = self._take(count * self._scalar_bytes(code))
        return struct.unpack(f"<{count}{SCALARS[code]}", taken)

    def _scalar_bytes(self, code: int) -> int:
        if code not in SCALARS:
            raise self.damaged(f"metadata has unknown type {code}")
        return struct.calcsize(f"<{SCALARS[code]}")

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Return the next `count` strings. A tokenizer has 100,000s of them, so the loop makes few
        calls."""
        data, at, limit, strings = self.data, self._at, len(self.data), []
        unpack = LENGTH.unpack_from
        try:
            for _ in range(count):
                end = at + LENGTH.size + unpack(data, at)[0]
                if end > limit:
                    raise self.damaged(TRUNCATED)
                strings.append(data[at + LENGTH.size : end].decode())
                at = end
        except struct.error:
            raise self.damaged(TRUNCATED) from None
        except UnicodeDecodeError as error:
            raise self.damaged(f"a string is not UTF-8: {error}") from error
        self._at = at
        return strings

    def _count(self, size: int, item_bytes: int, noun: str) -> int:
        """Return the number of items that follow, after checking that the file can hold them.

        item_bytes   the least size of an item
        """
        count = self._unsigned(size)
        if count * item_bytes > len(self.data) - self._at:
            raise self.damaged(f"{count:,} {noun} do not fit into the rest of the file")
        return count

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self.data):
            raise self.damaged(TRUNCATED)
        taken = self.data[self._at : end]
        self._at = end
        return taken

    def damaged(self, message: str) -> UnusableModel:
        return UnusableModel(f"{self._path}: {message}", remedy=FETCH_AGAIN)
