"""Arrays of numbers in messages: raw bytes with a dtype and a shape.

The class of an `Array` is its dtype, so decoding refuses floats in a message field declared
`Int32`. An array has no arithmetic: the engine converts it to a list, and the worker wraps its
buffer with `torch.frombuffer`. Items are little-endian, and rows are C-contiguous.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, ClassVar, Self

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("Tidegate's wire format is little-endian and read in place")

MAX_DIMS = 4
_CHECKED_BYTES = 1 << 16
"""Bytes that `find_outside` checks at once. They fit into the fastest caches of a processor."""


class Array:
    """A flat buffer of one dtype, and its shape. An array never changes after its creation. Two
    arrays are equal if they have the same dtype, shape and bytes.

    data    any C-contiguous buffer of `prod(shape) * itemsize` bytes
    shape   default: one dimension, as long as the buffer

    Raises ValueError if the buffer does not have the size of the shape.
    """

    __slots__ = ("data", "shape")
    typecode: ClassVar[str]
    itemsize: ClassVar[int]

    def __init__(self, data: Any, shape: Sequence[int] | None = None) -> None:
        view = memoryview(data)
        size = view.nbytes
        if size and (view.format != "B" or view.ndim != 1):
            view = view.cast("B")
        self.data = view
        if shape is None:
            self.shape: tuple[int, ...] = (size // self.itemsize,)
        elif len(shape) > MAX_DIMS or any(n < 0 for n in shape):
            raise ValueError(f"bad array shape {tuple(shape)}")
        else:
            self.shape = tuple(shape)
        if prod(self.shape) * self.itemsize != size:
            raise ValueError(
                f"{size} bytes do not fill shape {self.shape} of {type(self).__name__}"
            )

    @classmethod
    def of(cls, values: Iterable[float], shape: Sequence[int] | None = None) -> Self:
        """Return an array with a copy of `values`, which are in row order.

        Raises OverflowError or TypeError if the dtype cannot hold one of the values.
        """
        if shape is not None or not isinstance(values, list):
            return cls(array(cls.typecode, values), shape)
        try:  # three times as fast as an `array` of a list
            data: Any = struct.pack(f"{len(values)}{cls.typecode}", *values)
        except struct.error:
            data = array(cls.typecode, values)  # raises the error that fits
        made = cls.__new__(cls)
        made.data, made.shape = memoryview(data), (len(values),)
        return made

    def tolist(self) -> list[Any]:
        """Return all items in one flat list, in row order."""
        if not self.data.nbytes:
            return []
        # The type stubs of `cast` accept only a literal format code.
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

    def to_array(self) -> array[int]:
        """Return a copy of all items, in row order."""
        items = array(self.typecode)
        items.frombytes(self.data)
        return items

    def find_outside(self, limit: int) -> int | None:
        """Return the index of the first item that is not in `range(limit)`, in row order; None if
        there is none. `limit` is from 0 to 2**31.

        Thousands of items are checked at once, as the digits of a large integer to the base 2**32.
        The digit of a negative item has its top bit set. If no item is negative, adding
        2**31 - limit to each digit sets the top bit of those that are `limit` or more, and no digit
        overflows into the next.
        """
        size, addend, top_bits = 0, 0, 0
        for start in range(0, self.data.nbytes, _CHECKED_BYTES):
            part = self.data[start : start + _CHECKED_BYTES]
            if len(part) != size:
                size = len(part)
                ones = int.from_bytes(b"\1\0\0\0" * (size // self.itemsize), "little")
                addend, top_bits = ones * ((1 << 31) - limit), ones << 31
            digits = int.from_bytes(part, "little")
            if (digits | digits + addend) & top_bits:
                items = part.cast("i")
                found = next(i for i, item in enumerate(items) if not 0 <= item < limit)
                return start // self.itemsize + found
        return None


class Float32(Array):
    __slots__ = ()
    typecode = "f"
    itemsize = 4


class UInt8(Array):
    """An array of flags (each 0 or 1) or of raw bytes."""

    __slots__ = ()
    typecode = "B"
    itemsize = 1


KINDS: dict[int, type[Array]] = {1: Int32, 2: Float32, 3: UInt8}
"""Maps the dtype code on the wire to its class. A code is never reused for another dtype."""
CODES = {kind: code for code, kind in KINDS.items()}
