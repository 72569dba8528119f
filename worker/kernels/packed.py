"""Matrices in the packed layout that the compiled kernels read (csrc/packed.h).

A matrix is packed once, when it is loaded. Its parts are packed one by one, each in its own format.
If the file stores a part in quantised blocks, these are packed without rounding. Otherwise its
float32 or bfloat16 numbers are packed.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from worker.checkpoint.quant_blocks import QuantBlocks
from worker.kernels.addresses import address
from worker.kernels.native import DTYPE_CODES, NativeKernels, dtype_code
from worker.kernels.structs import CPacked, CPart
from worker.spec import kernel_sizes as sizes
from worker.spec.kernel_sizes import ALIGNMENT, GROUP, MAX_PARTS

DENSE_FORMATS = {torch.bfloat16: sizes.BF16, torch.float32: sizes.F32}
PackedPart = QuantBlocks | Tensor
"""Rows of a matrix: quantised, or numbers [outputs, inputs]."""


class PackedMatrix:
    """A packed matrix [outputs, inputs], and the memory that it is stored in. The constructor
    raises ValueError if `inputs` is not a multiple of GROUP."""

    def __init__(
        self,
        kernels: NativeKernels,
        parts: Sequence[tuple[int, int]],
        inputs: int,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        """Allocate the memory.

        parts           format and outputs of each part, at most MAX_PARTS
        rounds_inputs   round inputs to eight bits for quantised parts (csrc/rounded.h)
        """
        if inputs % GROUP:
            raise ValueError(f"{inputs} columns are not a multiple of {GROUP}")
        assert len(parts) <= MAX_PARTS
        sizes_bytes = [kernels.library.packed_bytes(fmt, rows, inputs) for fmt, rows in parts]
        # `np.zeros` does not touch the pages. The threads that pack the matrix touch them first.
        self.memory = torch.from_numpy(np.zeros(sum(sizes_bytes) + ALIGNMENT, np.uint8))
        start = self.memory.data_ptr() + -self.memory.data_ptr() % ALIGNMENT
        starts = [start, *(start + end for end in accumulate(sizes_bytes))]
        self.struct = CPacked(
            sum(rows for _, rows in parts),
            inputs,
            rounds_inputs,
            len(parts),
            tuple(CPart(at, *part) for at, part in zip(starts, parts, strict=False)),
        )

    @property
    def outputs(self) -> int:
        return int(self.struct.outputs)

    @property
    def inputs(self) -> int:
        return int(self.struct.inputs)


def pack(kernels: NativeKernels, *parts: PackedPart, rounds_inputs: bool = False) -> PackedMatrix:
    """Return the parts, stacked by rows, as a packed matrix.

    parts           at most MAX_PARTS; tensors are float32 or bfloat16 and keep their dtype
    rounds_inputs   round inputs to eight bits for quantised parts (csrc/rounded.h)

    Raises ValueError if the parts differ in their number of columns, or if it is not a multiple of
    GROUP.
    """
    inputs = {_columns(part) for part in parts}
    if len(inputs) > 1:
        raise ValueError(f"the parts of a matrix have {sorted(inputs)} columns")
    shapes = [(_format(part), _rows(part)) for part in parts]
    matrix = PackedMatrix(kernels, shapes, inputs.pop(), rounds_inputs=rounds_inputs)
    for part, struct in zip(parts, matrix.struct.parts, strict=False):
        if isinstance(part, QuantBlocks):
            _pack_blocks(kernels, part, struct.data)
        else:
            _pack_dense(kernels, part, struct.data)
    return matrix


def _rows(part: PackedPart) -> int:
    return len(part.raw) if isinstance(part, QuantBlocks) else len(part)


def _columns(part: PackedPart) -> int:
    return part.inputs if isinstance(part, QuantBlocks) else part.shape[1]


def _format(part: PackedPart) -> int:
    if isinstance(part, QuantBlocks):
        return sizes.BLOCK_FORMATS[part.kind.name]
    return DENSE_FORMATS[part.dtype]


def _pack_blocks(kernels: NativeKernels, blocks: QuantBlocks, to: int) -> None:
    raw = np.ascontiguousarray(blocks.raw)
    kernels.library.pack_blocks(
        torch.get_num_threads(), blocks.kind, raw.ctypes.data, len(raw), blocks.inputs, to
    )


def _pack_dense(kernels: NativeKernels, values: Tensor, to: int) -> None:
    kernels.library.pack_dense(
        dtype_code(values), torch.get_num_threads(), address(values), *values.shape, to
    )


@dataclass(slots=True)
class PackedEmbedding:
    """An `Embedding` (layers/embedding.py) with a packed matrix. A tied output head shares the
    matrix."""

    kernels: NativeKernels
    matrix: PackedMatrix
    #: The dtype of the rows that a lookup returns.
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.matrix.outputs

    @property
    def num_weights(self) -> int:
        return self.matrix.outputs * self.matrix.inputs

    @property
    def device(self) -> torch.device:
        return self.matrix.memory.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.size:
            raise IndexError("a token is not in the vocabulary")
        assert token_ids.dtype == torch.int64
        rows = torch.empty(len(token_ids), self.matrix.inputs, dtype=self.dtype)
        self.kernels.library.gather_rows(
            DTYPE_CODES[self.dtype],
            torch.get_num_threads(),
            byref(self.matrix.struct),
            address(token_ids),
            len(token_ids),
            address(rows),
        )
        return rows

    def tensors(self) -> Iterator[Tensor]:
        yield self.matrix.memory


@dataclass(slots=True)
class PackedLinear:
    """A `Linear` (layers/linear.py) with packed weights.

    A row of x gives the same output, bit for bit, whatever other rows x has.
    """

    kernels: NativeKernels
    matrix: PackedMatrix
    bias: Tensor | None = None

    @property
    def num_weights(self) -> int:
        bias = 0 if self.bias is None else self.bias.numel()
        return self.matrix.outputs * self.matrix.inputs + bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._into(x, x.new_empty(len(x), self.matrix.outputs))

    def to_float(self, x: Tensor) -> Tensor:
        """Return the output [N, out] for x [N, in] in float32, without rounding to x's dtype. The
        linear must have no bias."""
        assert self.bias is None
        y = x.new_empty(len(x), self.matrix.outputs, dtype=torch.float32)
        self.kernels.library.linear_to_float(*self._input(x), byref(self.matrix.struct), address(y))
        return y

    def tensors(self) -> Iterator[Tensor]:
        yield self.matrix.memory
        if self.bias is not None:
            yield self.bias

    def _into(self, x: Tensor, y: Tensor) -> Tensor:
        self.kernels.library.linear_same(
            *self._input(x), byref(self.matrix.struct), address(self.bias), address(y)
        )
        return y

    def _input(self, x: Tensor) -> Sequence[int | None]:
        if x.shape[1:] != (self.matrix.inputs,) or x.dtype not in DTYPE_CODES:
            raise ValueError(
                f"the input is {tuple(x.shape)} {x.dtype}; it must be [N, {self.matrix.inputs}]"
            )
        return DTYPE_CODES[x.dtype], torch.get_num_threads(), address(x), len(x)


class PackedHeads:
    """Linears of heads (layers/head_linears.py) with packed weights. A row of x gives the same
    output, bit for bit, whatever other rows x has."""

    def __init__(self, heads: Sequence[PackedLinear]) -> None:
        """`heads` have equal sizes and no biases."""
        matrices = [head.matrix for head in heads]
        (self._shape,) = {(matrix.outputs, matrix.inputs) for matrix in matrices}
        assert all(head.bias is None for head in heads)
        self.heads = heads
        self._library = heads[0].kernels.library
        self._structs = (CPacked * len(heads))(*(matrix.struct for matrix in matrices))

    def __call__(self, x: Tensor) -> Tensor:
        outputs, inputs = self._shape
        count, rows, _ = x.shape
        assert x.shape == (len(self.heads), rows, inputs)
        y = x.new_empty(count, rows, outputs)
        self._library.linear_heads(
            dtype_code(x),
            torch.get_num_threads(),
            count,
            address(x),
            rows,
            self._structs,
            address(y),
        )
        return y

    def tensors(self) -> Iterator[Tensor]:
        for head in self.heads:
            yield from head.tensors()
