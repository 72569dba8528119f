"""Loads the tensors of a model's files into the model's fused matrices, one tensor at a time.

A source reads a tensor, by its name in the files, straight into its part of the fused matrix. Only
a tensor that must be reordered, transposed or packed is held twice, while it is converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.layers.embedding import DenseEmbedding, Embedding
from worker.layers.linear import Dense, Linear
from worker.layers.mlp import ExpertMlp, Mlp
from worker.layers.norm import Norm
from worker.loading.quant_blocks import QuantBlocks
from worker.models.decoder import DecoderLayer, DecoderWeights
from worker.models.spec import LayerSpec, NormSpec
from worker.models.tensors import (
    FusedMatrix,
    LayerTensors,
    MatrixPart,
    MlpTensors,
    ModelTensors,
    NormTensor,
    RowOrder,
    VectorTensor,
)


class WeightSource(Protocol):
    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        """Copy the tensor `name` of the files, or its item `index` of the first axis, into
        `target`, which has the same shape. Convert dtype and device."""
        ...

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        """Return the quantised matrix `name`, or its item `index` of the first axis, in blocks that
        the kernels compute with; None if the tensor cannot be read as such blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the model whose weights have not been read yet. It is one tensor of the files, or
    several parts stacked by rows."""

    #: Rows of each part.
    rows: tuple[int, ...]
    #: Reads each part as quantised blocks; None for a part that cannot be read as blocks.
    blocks: Callable[[], list[QuantBlocks | None]]
    #: Reads all parts as numbers [out, in].
    values: Callable[[], Tensor]
    #: [out]
    bias: Tensor | None


class WeightLayout(Protocol):
    """Reads matrices and makes layers with them. An implementation decides in which form the layers
    keep their weights."""

    def linear(self, matrix: Matrix) -> Linear: ...

    def head(self, matrix: Matrix) -> Linear:
        """Return the output head, whose results are the logits."""
        ...

    def embedding(self, matrix: Matrix) -> Embedding: ...

    def tied_embedding(self, head: Linear) -> Embedding:
        """Return an embedding that shares the matrix of `head`, which this layout has made."""
        ...


class DenseLayout:
    """Keeps all weights as tensors of the model's dtype."""

    def linear(self, matrix: Matrix) -> Linear:
        return Dense(matrix.values(), matrix.bias)

    def head(self, matrix: Matrix) -> Linear:
        return self.linear(matrix)

    def embedding(self, matrix: Matrix) -> Embedding:
        return DenseEmbedding(matrix.values())

    def tied_embedding(self, head: Linear) -> Embedding:
        assert isinstance(head, Dense)
        return DenseEmbedding(head.weight)


def load_weights(
    tensors: ModelTensors,
    source: WeightSource,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: WeightLayout | None = None,
) -> DecoderWeights:
    """Read every tensor of the model and return its weights. Call `tensors.check` first.

    source   reads the files
    layout   makes the layers; None: DenseLayout
    """
    with torch.inference_mode():
        return _Loader(tensors, source, dtype, device, layout or DenseLayout()).load()


class _Loader:
    def __init__(
        self,
        tensors: ModelTensors,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        layout: WeightLayout,
    ) -> None:
        self._tensors = tensors
        self._source = source
        self._dtype = dtype
        self._device = device
        self._layout = layout

    def load(self) -> DecoderWeights:
        spec, tensors = self._tensors.spec, self._tensors
        head = self._layout.head(self._matrix(tensors.head))
        if spec.tied_embeddings:
            embedding = self._layout.tied_embedding(head)
        else:
            embedding = self._layout.embedding(self._matrix(tensors.embedding_matrix))
        positions = None
        if tensors.positions is not None:
            positions = self._empty(spec.learned_positions, spec.hidden)
            self._source.read_into(tensors.positions, positions)
        layers = [
            self._layer(layer, tensors.layer(index)) for index, layer in enumerate(spec.layers)
        ]
        norm = self._norm(tensors.norm, spec.norm)
        return DecoderWeights(embedding, positions, layers, norm, head)

    def _layer(self, layer: LayerSpec, tensors: LayerTensors) -> DecoderLayer:
        norm = self._tensors.spec.norm
        return DecoderLayer(
            spec=layer,
            attention_norm=self._norm_or_none(tensors.attention_norm, norm),
            qkv=self._fused(tensors.qkv),
            q_norm=self._norm_or_none(tensors.q_norm, norm),
            k_norm=self._norm_or_none(tensors.k_norm, norm),
            sinks=self._sinks(tensors.sinks),
            output=self._fused(tensors.output),
            post_attention_norm=self._norm_or_none(tensors.post_attention_norm, norm),
            mlp_norm=self._norm_or_none(tensors.mlp_norm, norm),
            mlp=self._mlp(layer, tensors),
            post_mlp_norm=self._norm_or_none(tensors.post_mlp_norm, norm),
        )

    def _mlp(self, layer: LayerSpec, tensors: LayerTensors) -> Mlp | ExpertMlp:
        mlps = [self._one_mlp(layer, each) for each in tensors.mlps]
        if tensors.router is None:
            return mlps[0]
        router = Dense(self._values(tensors.router), self._bias(tensors.router))
        return ExpertMlp(layer.mlp, router, mlps)

    def _one_mlp(self, layer: LayerSpec, tensors: MlpTensors) -> Mlp:
        return Mlp(layer.mlp, self._fused(tensors.gate_up), self._fused(tensors.down))

    def _norm_or_none(self, tensor: NormTensor | None, spec: NormSpec) -> Norm | None:
        return None if tensor is None else self._norm(tensor, spec)

    def _norm(self, tensor: NormTensor, spec: NormSpec) -> Norm:
        dtype = torch.float32 if spec.offset else self._dtype
        weight = torch.empty(tensor.size, dtype=dtype, device=self._device)
        self._source.read_into(f"{tensor.name}.weight", weight)
        bias = None
        if tensor.has_bias:
            bias = self._empty(tensor.size)
            self._source.read_into(f"{tensor.name}.bias", bias)
        return Norm(spec, weight.add_(spec.offset), bias)

    def _sinks(self, tensor: VectorTensor | None) -> Tensor | None:
        if tensor is None:
            return None
        sinks = torch.empty(tensor.size, dtype=torch.float32, device=self._device)
        self._source.read_into(tensor.name, sinks)
        return sinks

    def _fused(self, matrix: FusedMatrix) -> Linear:
        return self._layout.linear(self._matrix(matrix))

    def _matrix(self, matrix: FusedMatrix) -> Matrix:
        return Matrix(
            tuple(part.rows for part in matrix.parts),
            lambda: [self._blocks(part) for part in matrix.parts],
            lambda: self._values(matrix),
            self._bias(matrix),
        )

    def _blocks(self, part: MatrixPart) -> QuantBlocks | None:
        if part.is_transposed:
            return None
        blocks = self._source.blocks(part.weight, part.index)
        if blocks is None or part.order is None:
            return blocks
        order, raw = part.order, blocks.raw
        split = raw.reshape(*order.shape, *raw.shape[1:])
        axes = (*order.axes, *range(len(order.shape), split.ndim))
        return QuantBlocks(blocks.kind, np.transpose(split, axes).reshape(raw.shape))

    def _values(self, matrix: FusedMatrix) -> Tensor:
        """Return the parts, stacked by rows."""
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


def read_part(
    source: WeightSource, name: str, target: Tensor, part: MatrixPart, columns: int | None
) -> None:
    """Read the tensor `name`, the weight or the bias of `part`, into `target`. The rows are put in
    the model's order, and a weight that the file stores transposed is transposed.

    target    [rows, columns], or [rows] for a bias
    columns   None for a bias
    """
    is_transposed = part.is_transposed and columns is not None
    if not is_transposed and part.order is None:
        source.read_into(name, target, part.index)
        return
    shape = (columns, part.rows) if is_transposed else tuple(target.shape)
    stored = torch.empty(shape, dtype=torch.float32)  # type: ignore[arg-type]
    source.read_into(name, stored, part.index)
    rows = stored.T if is_transposed else stored
    target.copy_(_reordered(rows, part.order))


def _reordered(rows: Tensor, order: RowOrder | None) -> Tensor:
    """Return the rows of a file's tensor in the model's order."""
    if order is None:
        return rows
    split = rows.reshape(*order.shape, *rows.shape[1:])
    axes = (*order.axes, *range(len(order.shape), split.ndim))
    return split.permute(axes).reshape(rows.shape)
