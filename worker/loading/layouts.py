"""What the loader of weights needs: a source that reads tensors, and a layout that makes layers.
The layout with dense layers is here; the one with packed layers is in weight_layout.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from worker.checkpoint.quant_blocks import QuantBlocks
from worker.layers.embedding import DenseEmbedding, Embedding
from worker.layers.head_linears import DenseHeads
from worker.layers.linear import Dense, HeadLinears, Linear
from worker.spec.share import Box


class WeightSource(Protocol):
    def read_into(self, name: str, target: Tensor, index: int | None = None) -> None:
        """Copy the tensor `name` of the files, or its item `index` of the first axis, into
        `target`, which has the same shape. Convert dtype and device."""
        ...

    def blocks(self, name: str, index: int | None = None) -> QuantBlocks | None:
        """Return the quantised matrix `name`, or its item `index` of the first axis, in blocks that
        the kernels compute with; None if the tensor cannot be read as such blocks."""
        ...


@runtime_checkable
class PartSource(Protocol):
    """A `WeightSource` that can read parts of some tensors without reading the rest."""

    def read_box(self, name: str, target: Tensor, box: Box) -> bool:
        """Copy a part of the tensor `name` into `target`, as `read_into` does. Return False, and
        copy nothing, if the tensor can only be read whole."""
        ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the model whose weights have not been read yet. It is one tensor of the files, or
    several parts stacked by rows, each of another tensor."""

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

    def plain(self, matrix: Matrix) -> Linear:
        """Return a small linear whose weights stay plain numbers: a router, or gates."""
        ...

    def heads(self, matrices: Sequence[Matrix]) -> HeadLinears:
        """Return the linears of heads: one matrix for each of them, of equal sizes."""
        ...

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

    def plain(self, matrix: Matrix) -> Linear:
        return self.linear(matrix)

    def heads(self, matrices: Sequence[Matrix]) -> HeadLinears:
        return DenseHeads(torch.stack([matrix.values() for matrix in matrices]))

    def head(self, matrix: Matrix) -> Linear:
        return self.linear(matrix)

    def embedding(self, matrix: Matrix) -> Embedding:
        return DenseEmbedding(matrix.values())

    def tied_embedding(self, head: Linear) -> Embedding:
        assert isinstance(head, Dense)
        return DenseEmbedding(head.weight)


def matrix_of(values: Tensor, blocks: QuantBlocks | None = None) -> Matrix:
    """Return a matrix that has been read: its numbers, and its blocks if it has some."""
    return Matrix((len(values),), lambda: [blocks], lambda: values, None)
