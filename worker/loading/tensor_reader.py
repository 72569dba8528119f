"""Reads matrices, norms and vectors of a model from its files.

A source reads a tensor, by its name in the files, straight into its part of the fused matrix. Only
a tensor that must be reordered, transposed or packed is held twice, while it is converted. A rank
of a tensor parallel group reads only its parts of the tensors, if the source can (`PartSource`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.checkpoint.quant_blocks import QuantBlocks
from worker.layers.group import Group
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.loading.layouts import Matrix, WeightLayout, WeightSource
from worker.loading.parts import cut_blocks, read_box, read_part
from worker.spec.matrices import FusedMatrix, MatrixPart, NormTensor, VectorTensor
from worker.spec.model_spec import NormSpec
from worker.spec.share import Box, VectorCut
from worker.spec.tensors import ModelTensors


class TensorReader:
    """Reads single tensors of a model. The layers are made of them by the classes that inherit from
    it."""

    def __init__(
        self,
        tensors: ModelTensors,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        layout: WeightLayout,
        group: Group | None,
    ) -> None:
        self._tensors = tensors
        self._source = source
        self._dtype = dtype
        self._device = device
        self._layout = layout
        self._group = group

    def _plain_norm(self, size: int) -> Norm:
        """Return a norm without a weight."""
        ones = torch.ones(size, dtype=torch.float32, device=self._device)
        return Norm(NormSpec(eps=self._tensors.spec.norm.eps), ones)

    def _norm_or_none(self, tensor: NormTensor | None, spec: NormSpec) -> Norm | None:
        return None if tensor is None else self._norm(tensor, spec)

    def _norm(self, tensor: NormTensor, spec: NormSpec) -> Norm:
        dtype = torch.float32 if spec.offset and spec.kind == "rms" else self._dtype
        weight = torch.empty(tensor.size, dtype=dtype, device=self._device)
        self._read_vector(tensor.weight, weight, tensor.cut)
        bias = None
        if tensor.has_bias:
            bias = self._empty(tensor.size)
            self._source.read_into(f"{tensor.name}.bias", bias)
        return Norm(spec, weight.add_(spec.offset), bias)

    def _vector_or_none(self, tensor: VectorTensor | None) -> Tensor | None:
        return None if tensor is None else self._vector(tensor)

    def _vector(self, tensor: VectorTensor) -> Tensor:
        """Read a vector [size] float32."""
        vector = torch.empty(tensor.size, dtype=torch.float32, device=self._device)
        self._read_vector(tensor.name, vector, tensor.cut)
        return vector

    def _read_vector(self, name: str, target: Tensor, cut: VectorCut | None) -> None:
        if cut is None:
            self._source.read_into(name, target)
        else:
            read_box(self._source, name, target, Box((cut.items,), (cut.whole,)))

    def _fused(self, matrix: FusedMatrix) -> Linear:
        return self._layout.linear(self._matrix(matrix))

    def _plain(self, matrix: FusedMatrix) -> Linear:
        return self._layout.plain(self._matrix(matrix))

    def _matrix(self, matrix: FusedMatrix) -> Matrix:
        return Matrix(
            tuple(sum(part.rows for part in run) for run in matrix.runs),
            lambda: [self._blocks(run) for run in matrix.runs],
            lambda: self._values(matrix),
            self._bias(matrix),
        )

    def _blocks(self, parts: Sequence[MatrixPart]) -> QuantBlocks | None:
        """Return the blocks of parts of one tensor."""
        part = parts[0]
        if part.is_transposed:
            return None
        blocks = self._source.blocks(part.weight, part.index)
        if blocks is not None and part.cut is not None:
            blocks = cut_blocks(blocks, [each.cut for each in parts if each.cut is not None])
        if blocks is None or part.order is None:
            return blocks
        return QuantBlocks(blocks.kind, blocks.raw[part.order.file_rows_of(len(blocks.raw))])

    def _values(self, matrix: FusedMatrix) -> Tensor:
        """Read the parts of a fused matrix, and return them stacked by rows."""
        whole = self._empty(matrix.rows, matrix.columns)
        targets = torch.split(whole, [part.rows for part in matrix.parts])
        for part, target in zip(matrix.parts, targets, strict=True):
            read_part(self._source, part.weight, target, part, matrix.columns)
        return whole

    def _bias(self, matrix: FusedMatrix) -> Tensor | None:
        if not matrix.has_bias:
            return None
        whole = self._empty(matrix.rows)
        targets = torch.split(whole, [part.rows for part in matrix.parts])
        for part, target in zip(matrix.parts, targets, strict=True):
            read_part(self._source, part.bias, target, part, None)
        return whole

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
