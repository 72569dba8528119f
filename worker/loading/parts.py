"""Reads parts of matrices: a rank's rows and columns, in another order, or transposed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.checkpoint.quant_blocks import QuantBlocks
from worker.loading.layouts import Matrix, PartSource, WeightSource, matrix_of
from worker.spec.latent_tensors import LatentAttentionTensors
from worker.spec.matrices import MatrixPart
from worker.spec.share import Box, MatrixCut
from worker.spec.tensor_names import RowOrder


def cut_blocks(blocks: QuantBlocks, cuts: Sequence[MatrixCut]) -> QuantBlocks | None:
    """Return the rows of all `cuts` in blocks; None if a cut has only some of the columns."""
    if any(len(cut.columns) < cut.whole[1] for cut in cuts):
        return None
    ranges = (rows for cut in cuts for rows in cut.rows)
    return QuantBlocks(blocks.kind, np.concatenate([blocks.raw[r.start : r.stop] for r in ranges]))


def read_part(
    source: WeightSource, name: str, target: Tensor, part: MatrixPart, columns: int | None
) -> None:
    """Read the tensor `name`, the weight or the bias of `part`, into `target`. The rows are put in
    the model's order, and a weight that the file stores transposed is transposed.

    target    [rows, columns], or [rows] for a bias
    columns   None for a bias
    """
    is_transposed = part.is_transposed and columns is not None
    cut = part.cut
    if cut is not None and part.order is None:
        _read_cut(source, name, target, part, cut)
        return
    if not is_transposed and part.order is None:
        source.read_into(name, target, part.index)
        return
    shape: tuple[int, ...] = (part.rows,) if columns is None else (part.rows, columns)
    if cut is not None:
        shape = cut.whole[: target.dim()]
    stored = torch.empty(shape[::-1] if is_transposed else shape, dtype=torch.float32)
    source.read_into(name, stored, part.index)
    rows = _reordered(stored.T if is_transposed else stored, part.order)
    if cut is not None:
        rows = torch.cat([rows[each.start : each.stop] for each in cut.rows])
        rows = rows if columns is None else rows[:, cut.columns.start : cut.columns.stop]
    target.copy_(rows)


def _read_cut(
    source: WeightSource, name: str, target: Tensor, part: MatrixPart, cut: MatrixCut
) -> None:
    """Read the rows and columns of `cut` into `target`, a weight or a bias. The file has them in
    the model's order. A tensor that holds several experts is never cut."""
    done = 0
    for rows in cut.rows:
        piece = target[done : done + len(rows)]
        done += len(rows)
        if target.dim() == 1:
            read_box(source, name, piece, Box((rows,), cut.whole[:1]))
        elif not part.is_transposed:
            read_box(source, name, piece, Box((rows, cut.columns), cut.whole))
        else:
            stored = torch.empty((len(cut.columns), len(rows)), dtype=torch.float32)
            read_box(source, name, stored, Box((cut.columns, rows), cut.whole[::-1]))
            piece.copy_(stored.T)


def read_box(source: WeightSource, name: str, target: Tensor, box: Box) -> None:
    """Read a part of a tensor into `target`. If the source can only read the whole tensor, the rest
    is dropped."""
    if isinstance(source, PartSource) and source.read_box(name, target, box):
        return
    whole = torch.empty(box.whole, dtype=target.dtype)
    source.read_into(name, whole)
    target.copy_(whole[box.slices])


def of_heads(
    tensors: LatentAttentionTensors, values: Tensor, blocks: QuantBlocks | None
) -> tuple[list[Matrix], list[Matrix]]:
    """Return the matrices of the keys and those of the values of all heads, which are rows of one
    tensor.

    values   the numbers of the tensor
    blocks   the tensor in quantised blocks; None: it is not quantised. Matrices of keys are
             transposed, so they are numbers all the same
    """
    keys, of_values, first = [], [], 0
    for key, value in zip(tensors.key_up, tensors.value_up, strict=True):
        middle, end = first + key.columns, first + key.columns + value.rows
        keys.append(matrix_of(values[first:middle].T.contiguous()))
        cut = value.parts[0].cut
        own = None if blocks is None or cut is None else cut_blocks(blocks, [cut])
        of_values.append(matrix_of(values[middle:end], own))
        first = end
    return keys, of_values


def _reordered(rows: Tensor, order: RowOrder | None) -> Tensor:
    """Return the rows of a file's tensor in the model's order."""
    if order is None:
        return rows
    return rows[torch.tensor(order.file_rows_of(len(rows)))]
