"""Matrices in the layout of the compiled kernels. They are packed once at loading: from a file's
own quantised blocks if it has them, without rounding, otherwise from numbers.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.kernels.native import NUMBERS, NativeKernels, address, numbers
from worker.kernels.sizes import ALIGNMENT, BF16, F32, Q4, Q8
from worker.kernels.structs import CPacked
from worker.loading.quant_blocks import BLOCK_WEIGHTS, BlockKind, QuantBlocks

BLOCK_FORMATS = {BlockKind.Q4_0: Q4, BlockKind.Q4_1: Q4, BlockKind.Q8_0: Q8}
DENSE_FORMATS = {torch.bfloat16: BF16, torch.float32: F32}


class PackedMatrix:
    """A packed matrix [outputs, inputs] in memory of its own."""

    def __init__(self, kernels: NativeKernels, fmt: int, outputs: int, inputs: int) -> None:
        if inputs % BLOCK_WEIGHTS:
            raise ValueError(f"{inputs} columns are not whole groups of {BLOCK_WEIGHTS}")
        size = kernels.library.packed_bytes(fmt, outputs, inputs)
        # Pages of zeros, touched first by the thread that packs them.
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
    """Pack values [outputs, inputs] of float32 or bfloat16, without changing the dtype."""
    outputs, inputs = values.shape
    matrix = PackedMatrix(kernels, DENSE_FORMATS[values.dtype], outputs, inputs)
    kernels.library.pack_dense(
        numbers(values),
        torch.get_num_threads(),
        address(values),
        outputs,
        inputs,
        matrix.struct.data,
    )
    return matrix


@dataclass(slots=True)
class PackedLinear:
    """A layers.linear.Linear whose rows have the same bits alone and in any batch."""

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
        """Return [N, out] float32 of x [N, in], never rounded to x's dtype."""
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
        if x.shape[1:] != (self.matrix.inputs,) or x.dtype not in NUMBERS:
            raise ValueError(
                f"the input is {tuple(x.shape)} {x.dtype}; it must be [N, {self.matrix.inputs}]"
            )
        return NUMBERS[x.dtype], torch.get_num_threads(), address(x), len(x)
