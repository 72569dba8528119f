"""Matrices in the packed layout that the compiled kernels read (csrc/packed.h).

A matrix is packed once, when it is loaded. If the file stores it in quantised blocks, these are
packed without rounding. Otherwise its float32 or bfloat16 numbers are packed.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.kernels.native import DTYPE_CODES, NativeKernels, address, dtype_code
from worker.kernels.sizes import ALIGNMENT, BF16, F32, Q4, Q8
from worker.kernels.structs import CPacked
from worker.loading.quant_blocks import BLOCK_WEIGHTS, BlockKind, QuantBlocks

BLOCK_FORMATS = {BlockKind.Q4_0: Q4, BlockKind.Q4_1: Q4, BlockKind.Q8_0: Q8}
DENSE_FORMATS = {torch.bfloat16: BF16, torch.float32: F32}


class PackedMatrix:
    """A packed matrix [outputs, inputs], and the memory that it is stored in."""

    def __init__(self, kernels: NativeKernels, fmt: int, outputs: int, inputs: int) -> None:
        if inputs % BLOCK_WEIGHTS:
            raise ValueError(f"{inputs} columns are not a multiple of {BLOCK_WEIGHTS}")
        size = kernels.library.packed_bytes(fmt, outputs, inputs)
        # `np.zeros` does not touch the pages. The threads that pack the matrix touch them first.
        self.memory = torch.from_numpy(np.zeros(size + ALIGNMENT, np.uint8))
        start = -self.memory.data_ptr() % ALIGNMENT
        self.struct = CPacked(self.memory.data_ptr() + start, fmt, outputs, inputs)

    @property
    def outputs(self) -> int:
        return int(self.struct.outputs)

    @property
    def inputs(self) -> int:
        return int(self.struct.inputs)


def pack_blocks(kernels: NativeKernels, blocks: QuantBlocks) -> PackedMatrix:
    """Return the quantised blocks as a packed matrix."""
    outputs, groups, _ = blocks.raw.shape
    raw = np.ascontiguousarray(blocks.raw)
    matrix = PackedMatrix(kernels, BLOCK_FORMATS[blocks.kind], outputs, groups * BLOCK_WEIGHTS)
    kernels.library.pack_blocks(
        torch.get_num_threads(),
        blocks.kind,
        raw.ctypes.data,
        outputs,
        groups * BLOCK_WEIGHTS,
        matrix.struct.data,
    )
    return matrix


def pack_dense(kernels: NativeKernels, values: Tensor) -> PackedMatrix:
    """Return values [outputs, inputs], float32 or bfloat16, as a packed matrix of that dtype."""
    outputs, inputs = values.shape
    matrix = PackedMatrix(kernels, DENSE_FORMATS[values.dtype], outputs, inputs)
    kernels.library.pack_dense(
        dtype_code(values),
        torch.get_num_threads(),
        address(values),
        outputs,
        inputs,
        matrix.struct.data,
    )
    return matrix


@dataclass(slots=True)
class PackedLinear:
    """A `Linear` (layers/linear.py) with packed weights.

    A row has the same bits alone and in any batch.
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
        """Return the output [N, out] for x [N, in] in float32, without rounding to x's dtype."""
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
