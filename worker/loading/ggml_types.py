"""Number types of GGUF files: their codes, and the numbers and bytes of a block of each.

The package `gguf` has the same table, but importing it takes a tenth of the worker's start. It is
imported only for types that this package does not read itself. A test compares the two tables.
"""

from __future__ import annotations

from enum import IntEnum


class GGMLType(IntEnum):
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
        """(numbers, bytes) in a block."""
        return _BLOCKS[self]

    @property
    def is_readable(self) -> bool:
        """Return whether this package or `gguf` can read the numbers."""
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
