"""Typed, shaped views of raw bytes: how arrays of numbers cross a process boundary.

An `Array` has a buffer and a shape. Its class is its dtype, so a message field declared `Int32`
refuses floats when decoded. There is no arithmetic: the engine reads lists, the worker wraps the
buffer with `torch.frombuffer`. Items are little-endian, rows are C-contiguous.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, ClassVar, Self

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("Tidegate's wire format is little-endian and read in place")

MAX_DIMS = 4


class Array:
    """A flat buffer of one dtype and its shape. Immutable by convention; compared by value.

    `data` is any C-contiguous buffer of `prod(shape) * itemsize` bytes.
    Raises ValueError if the sizes differ.
    """

    __slots__ = ("data", "shape")
    typecode: ClassVar[str]
    itemsize: ClassVar[int]

    def __init__(self, data: Any, shape: Sequence[int] | None = None) -> None:
        view = memoryview(data)
        if view.nbytes and (view.format != "B" or view.ndim != 1):
            view = view.cast("B")
        size = view.nbytes
        if shape is None:
            shape = (size // self.itemsize,)
        if len(shape) > MAX_DIMS or any(n < 0 for n in shape):
            raise ValueError(f"bad array shape {tuple(shape)}")
        if prod(shape) * self.itemsize != size:
            raise ValueError(
                f"{size} bytes do not fill shape {tuple(shape)} of {type(self).__name__}"
            )
        self.data = view
        self.shape = tuple(shape)

    @classmethod
    def of(cls, values: Iterable[float], shape: Sequence[int] | None = None) -> Self:
        """Copy `values`, in row order. Raises OverflowError or TypeError for a wrong value."""
        return cls(array(cls.typecode, values), shape)

    def tolist(self) -> list[Any]:
        """Return all items, flat, in row order."""
        if not self.data.nbytes:
            return []
        # Typed for codes that are literals only.
        values: list[Any] = self.data.cast(self.typecode).tolist()  # type: ignore[call-overload]
        return values

    def __len__(self) -> int:
        """Return the number of rows, as numpy does."""
        return self.shape[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array) or type(other) is not type(self):
            return False
        return self.shape == other.shape and self.data == other.data

    def __hash__(self) -> int:
        return hash((type(self), self.shape, bytes(self.data)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape})"


class Int32(Array):
    __slots__ = ()
    typecode = "i"
    itemsize = 4


class Float32(Array):
    __slots__ = ()
    typecode = "f"
    itemsize = 4


class UInt8(Array):
    """Flags and masks, 0 or 1 per item; or raw bytes."""

    __slots__ = ()
    typecode = "B"
    itemsize = 1


KINDS: dict[int, type[Array]] = {1: Int32, 2: Float32, 3: UInt8}
"""dtype code on the wire -> class. Codes are never reused."""
CODES = {kind: code for code, kind in KINDS.items()}
