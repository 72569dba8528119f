"""The tensors of a GGUF file, and the tensors of safetensors files that they are made from.

Both lists come from `spec.tensors`. They are lists of the same model's tensors, once with the
names and row orders of the files that are read, and once with those of GGUF.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.loading.layouts import WeightSource
from worker.loading.parts import read_part
from worker.spec.matrices import FusedMatrix, MatrixPart, NormTensor
from worker.spec.tensor_names import RowOrder
from worker.spec.tensors import ModelTensors

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the GGUF file.

    parts   (name, part) of each tensor that is read for it: one for each expert if the tensor holds
            all experts of a layer, otherwise one
    """

    name: str
    shape: Shape
    parts: tuple[tuple[str, MatrixPart], ...]
    #: Order of the rows in the GGUF file, if it is not the model's.
    order: RowOrder | None = None
    #: Added to all numbers.
    offset: float = 0.0
    #: First row of this tensor in its part, which has more rows if the files fuse matrices that
    #: GGUF keeps apart.
    first_row: int = 0

    def read(self, source: WeightSource) -> Iterator[Tensor]:
        """Yield the numbers of each part, float32 [rows, columns] or [size], in the row order of
        the GGUF file."""
        shape = self.shape[-2:] if len(self.shape) == 3 else self.shape
        for name, part in self.parts:
            whole = torch.empty((part.rows, *shape[1:]), dtype=torch.float32)
            columns = shape[1] if len(shape) == 2 else None
            read_part(source, name, whole, part, columns)
            target = whole[self.first_row : self.first_row + shape[0]]
            if self.order is not None:
                target = in_file_order(target, self.order)
            yield target.add_(self.offset)


def in_file_order(rows: Tensor, order: RowOrder) -> Tensor:
    """Return `rows`, which are in the model's order, in the file's order `order`."""
    return rows[torch.tensor(order.model_rows_of(len(rows)))]


def output_tensors(ours: ModelTensors, gguf: ModelTensors, *, offset: float) -> list[OutputTensor]:
    """Return the tensors to write to the GGUF file, in order.

    ours     the model's tensors in the files that are read
    gguf     the same tensors with the names and row orders of GGUF
    offset   number that is added to the weights of norms
    """
    spec = ours.spec
    found = [_plain(gguf.embedding, ours.embedding, (spec.vocab_size, spec.hidden))]
    if ours.positions is not None and gguf.positions is not None:
        shape = (spec.learned_positions, spec.hidden)
        found.append(_plain(gguf.positions, ours.positions, shape))
    for index in range(spec.num_layers):
        one, other = ours.layer(index), gguf.layer(index)
        for mine, theirs in zip(one.norms, other.norms, strict=True):
            found += _norm(mine, theirs, offset)
        routers = [(one.router, other.router)] if one.router and other.router else []
        for pair in [*zip(one.matrices, other.matrices, strict=True), *routers]:
            found += _matrix(*pair)
    found += _norm(ours.norm, gguf.norm, offset)
    if not spec.tied_embeddings:
        found += _matrix(ours.head, gguf.head)
    return _merged(found)


def _plain(name: str, source: str, shape: Shape, offset: float = 0.0) -> OutputTensor:
    part = MatrixPart(source, shape[0])
    return OutputTensor(name, shape, ((source, part),), offset=offset)


def _norm(ours: NormTensor, gguf: NormTensor, offset: float) -> Iterator[OutputTensor]:
    yield _plain(gguf.weight, ours.weight, (ours.size,), offset)
    if ours.has_bias:
        yield _plain(f"{gguf.name}.bias", f"{ours.name}.bias", (ours.size,))


def _matrix(ours: FusedMatrix, gguf: FusedMatrix) -> Iterator[OutputTensor]:
    """Yield the tensors of a matrix. Several of them may be different rows of one tensor that is
    read."""
    parts = iter(ours.parts)
    part, first = next(parts), 0
    for theirs in gguf.parts:
        if first == part.rows:
            part, first = next(parts), 0
        shape, order = theirs.shape(gguf.columns), theirs.order
        weight, bias = ((part.weight, part),), ((part.bias, part),)
        yield OutputTensor(theirs.weight, shape, weight, order, first_row=first)
        if ours.has_bias:
            yield OutputTensor(theirs.bias, theirs.bias_shape, bias, order, first_row=first)
        first += theirs.rows


def _merged(tensors: list[OutputTensor]) -> list[OutputTensor]:
    """Return the tensors. Those with equal names, the experts of a layer, are joined into one."""
    found: dict[str, OutputTensor] = {}
    for tensor in tensors:
        first = found.get(tensor.name)
        parts = tensor.parts if first is None else first.parts + tensor.parts
        found[tensor.name] = replace(tensor, parts=parts)
    return list(found.values())
