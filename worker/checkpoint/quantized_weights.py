"""Reads quantised matrices of safetensors files: as numbers, or as blocks that stay packed.

    kind                    blocks   difference from the numbers
    INT4                    Q4_1     the same integers; scale, and scale * zero point, rounded to
                                     float16
    INT8                    Q8_0     the same integers, scales rounded to float16; but rounded as
                                     below if columns of a block may have different scales, or if
                                     an integer is more than 127 from its zero point
    INT4 in any order, FP8  Q8_0     rounded to 1/254 of the largest number of 32, a small part of
                                     the type's own error

A matrix is dequantised in pieces of some rows, never as a whole.

Legend: R rows of a piece, C columns, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.checkpoint.quant_blocks import BLOCK_WEIGHTS, BlockKind, QuantBlocks, q8_blocks
from worker.checkpoint.quantized_layers import QuantizedLayer
from worker.errors import UnusableModel
from worker.spec.quantization import INT4, INT8

Floats = NDArray[np.float32]
PIECE_ITEMS = 1 << 20
"""Numbers dequantised at once."""
PIECE_ROWS = 32
"""Each piece has a multiple of this number of rows, so no int32 of the layout "awq" is split."""
MAX_INTEGER = 127
"""Largest integer of a Q8_0 block."""
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position in an int32 of each of eight neighbours, in the layout "awq"."""


def _float8() -> Floats:
    """Return the number that each byte stands for in the format float8_e4m3fn: a sign, four bits of
    exponent with a bias of 7, and three bits of mantissa. There are no infinities. A byte is NaN if
    all bits except the sign are set."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[(codes & 127) == 127] = np.nan
    return np.where(codes >> 7, -values, values).astype(np.float32)


FLOAT8 = _float8()


class QuantizedMatrix:
    """A quantised matrix [rows, columns], whose tensors the constructor reads.

    read   returns the tensor with a name: int32 as uint32, float8_e4m3fn as its bytes, other floats
           as float32
    """

    def __init__(self, layer: QuantizedLayer, read: Callable[[str], NDArray[Any]]) -> None:
        self._layer = layer
        self._codes = read(layer.codes)
        #: Scales, [rows, G], or [1, 1] if the whole matrix shares one.
        self._scale = self._by_row(read(layer.scales))
        #: Zero points, [rows, G] or [1, G]; None if all are zero.
        self._zero = self._zeros(None if layer.zeros is None else read(layer.zeros))
        #: [C] the group of each column.
        self._group = self._groups(None if layer.order is None else read(layer.order))

    def pieces(self) -> Iterator[tuple[int, Floats]]:
        """Yield the first row of each piece, and its numbers [R, C]."""
        for rows in self._pieces():
            yield rows.start, self._values(rows)

    def blocks(self) -> QuantBlocks | None:
        """Return the matrix as quantised blocks; None if its rows are not whole blocks."""
        if self._layer.columns % BLOCK_WEIGHTS:
            return None
        if self._layer.kind == INT4:
            return QuantBlocks(BlockKind.Q4_1, np.concatenate([*map(self._q4, self._pieces())]))
        return QuantBlocks(BlockKind.Q8_0, np.concatenate([*map(self._q8, self._pieces())]))

    def _pieces(self) -> Iterator[slice]:
        rows = self._layer.rows
        step = max(PIECE_ITEMS // self._layer.columns // PIECE_ROWS, 1) * PIECE_ROWS
        for first in range(0, rows, step):
            yield slice(first, min(first + step, rows))

    def _values(self, rows: slice) -> Floats:
        codes = self._codes_of(rows)
        is_float = self._layer.scheme.is_float
        numbers: Floats = FLOAT8[codes] if is_float else codes.astype(np.float32)
        with np.errstate(all="ignore"):
            if self._zero is not None:
                numbers -= _rows(self._zero, rows)[:, self._group]
            numbers *= _rows(self._scale, rows)[:, self._group]
        return numbers

    def _q4(self, rows: slice) -> NDArray[np.uint8]:
        """Return Q4_1 blocks [R, C / 32, 20]: scale, minimum, and integers."""
        codes, groups = self._codes_of(rows), self._group[::BLOCK_WEIGHTS]
        halves = codes.reshape(len(codes), -1, 2, BLOCK_WEIGHTS // 2)
        assert self._zero is not None
        heads = np.empty((*halves.shape[:2], 2), np.float16)
        with np.errstate(all="ignore"):
            scale = _rows(self._scale, rows)
            heads[:, :, 0] = scale[:, groups]
            heads[:, :, 1] = (-scale * _rows(self._zero, rows))[:, groups]
        raw = np.empty((*halves.shape[:2], 4 + BLOCK_WEIGHTS // 2), np.uint8)
        raw[:, :, :4] = heads.view(np.uint8)
        raw[:, :, 4:] = halves[:, :, 0] | halves[:, :, 1] << 4
        return raw

    def _q8(self, rows: slice) -> NDArray[np.uint8]:
        """Return Q8_0 blocks [R, C / 32, 34]."""
        values = self._values(rows)
        blocks, unit = values.reshape(-1, BLOCK_WEIGHTS), None
        if self._layer.kind == INT8 and self._layer.is_aligned:
            scale = _rows(self._scale, rows)[:, self._group[::BLOCK_WEIGHTS]]
            unit = np.broadcast_to(scale, (len(values), scale.shape[1])).reshape(-1)
            with np.errstate(all="ignore"):
                largest = np.abs(blocks).max(axis=1)
                is_wide = largest > np.abs(unit) * np.float32(MAX_INTEGER + 0.5)
            unit = np.where(is_wide, largest / np.float32(MAX_INTEGER), unit)
        return q8_blocks(blocks, unit).reshape(len(values), -1, 2 + BLOCK_WEIGHTS)

    def _codes_of(self, rows: slice) -> NDArray[Any]:
        """Return the stored integers [R, C] of these rows: signed in the layout "plain", else
        unsigned. Floats are returned as bytes."""
        bits, codes = self._layer.scheme.bits, self._codes
        match self._layer.scheme.layout:
            case "gptq":
                return _unpacked(codes[:, rows].T, bits)[:, : self._layer.columns]
            case "awq":
                words = slice(rows.start // 8, -(-rows.stop // 8))
                return _awq_order(_unpacked(codes[:, words], bits))[:, : rows.stop - rows.start].T
            case "packed":
                return _unpacked(codes[rows], bits)[:, : self._layer.columns]
            case "plain":
                return codes[rows]

    def _by_row(self, stored: NDArray[Any]) -> Floats:
        """Return `stored`, scales or zero points, as [rows, G], or as [1, 1] if the whole matrix
        shares one."""
        scheme, rows = self._layer.scheme, self._layer.rows
        if scheme.layout in ("gptq", "awq"):
            found = stored.T
        elif scheme.block == (0, 0):
            found = stored.reshape(1, 1)
        elif scheme.block[0] == 1:
            found = stored.reshape(rows, -1)
        else:
            found = np.repeat(stored, scheme.block[0], axis=0)[:rows]
        return np.ascontiguousarray(found, np.float32)

    def _zeros(self, stored: NDArray[Any] | None) -> Floats | None:
        """Return the zero points of `_codes_of`, [rows, G] or [1, G]; None if all are zero."""
        scheme, rows = self._layer.scheme, self._layer.rows
        bits, layout = scheme.bits, scheme.layout
        if stored is None:
            middle = np.full((1, self._scale.shape[1]), 1 << (bits - 1), np.float32)
            return middle if layout == "packed" else None
        if layout == "plain":
            return self._by_row(stored)
        # GPTQ subtracts the offset from whole words, so a zero point of 0 borrows from the next.
        offset = scheme.zero_offset * sum(1 << at for at in range(0, 32, bits))
        words = stored + np.asarray([offset], np.uint32)
        unpacked = _unpacked(words.T if layout == "packed" else words, bits)
        if layout == "awq":
            unpacked = _awq_order(unpacked)
        return np.ascontiguousarray(unpacked[:, :rows].T, np.float32)

    def _groups(self, stored: NDArray[Any] | None) -> NDArray[np.int64]:
        if stored is None:
            return np.arange(self._layer.columns) // self._layer.group
        groups = stored.view(np.int32).astype(np.int64)
        if groups.min() < 0 or groups.max() >= self._scale.shape[1]:
            raise UnusableModel(f"{self._layer.order} names a group that does not exist")
        return groups


def _rows(values: Floats, rows: slice) -> Floats:
    return values if len(values) == 1 else values[rows]


def _unpacked(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Return the integers [N, 32 / bits * W] in words [N, W]; the lowest bits come first."""
    packed = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return packed
    halves = np.stack([packed & 15, packed >> 4], axis=2)
    return halves.reshape(len(packed), -1)


def _awq_order(integers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return integers [N, 8 W] in the model's order, from the order in the words of AWQ."""
    return integers.reshape(len(integers), -1, 8)[:, :, AWQ_ORDER].reshape(integers.shape)
