"""Matrices, norms and vectors, and the tensors in the files that form them. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from worker.spec.share import MatrixCut, VectorCut
from worker.spec.tensor_names import ENDINGS, Endings, RowOrder

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One tensor of a matrix that consists of several tensors, stacked by rows.

    rows    number of rows that are read
    index   index of the expert, or of the stream of hidden states, if the tensor holds several
    of      number of experts or streams that the tensor holds
    cut     the part of the tensor that is read; None: all of it
    """

    name: str
    rows: int
    order: RowOrder | None = None
    is_transposed: bool = False
    index: int | None = None
    of: int = 1
    endings: Endings = ENDINGS
    cut: MatrixCut | None = None

    @property
    def weight(self) -> str:
        """Return the name of the weight."""
        return self.name + self.endings[0]

    @property
    def bias(self) -> str:
        """Return the name of the bias."""
        return self.name + self.endings[1]

    def shape(self, columns: int) -> Shape:
        """Return the shape of the weight in the file. `columns` is the number of columns that are
        read."""
        rows, columns = (self.rows, columns) if self.cut is None else self.cut.whole
        return self._stacked((columns, rows) if self.is_transposed else (rows, columns))

    @property
    def bias_shape(self) -> Shape:
        """Return the shape of the bias in the file."""
        return self._stacked((self.rows if self.cut is None else self.cut.whole[0],))

    def _stacked(self, shape: Shape) -> Shape:
        return shape if self.index is None else (self.of, *shape)


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """Matrices with the same input, which are computed as one matrix."""

    parts: tuple[MatrixPart, ...]
    columns: int
    has_bias: bool = False

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def names(self) -> list[str]:
        """Return the names of the weights."""
        return [part.weight for part in self.parts]

    @property
    def runs(self) -> list[tuple[MatrixPart, ...]]:
        """Return the parts, those of one tensor that follow each other together."""
        runs = groupby(self.parts, key=lambda part: (part.name, part.index))
        return [tuple(parts) for _, parts in runs]

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each weight and bias in the file."""
        for part in self.parts:
            yield part.weight, part.shape(self.columns)
            if self.has_bias:
                yield part.bias, part.bias_shape


@dataclass(frozen=True, slots=True)
class NormTensor:
    """A norm's weight [size], and its bias if it has one.

    cut      the items that are read; None: all. A norm with a bias is never cut
    ending   end of the name of the weight
    """

    name: str
    size: int
    has_bias: bool = False
    cut: VectorCut | None = None
    ending: str = ENDINGS[0]

    @property
    def weight(self) -> str:
        """Return the name of the weight."""
        return self.name + self.ending

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        yield self.weight, (self.size if self.cut is None else self.cut.whole,)
        if self.has_bias:
            yield f"{self.name}.bias", (self.size,)


@dataclass(frozen=True, slots=True)
class VectorTensor:
    """A vector [size]. `name` is its whole name, to which no ending is added.

    cut   the items that are read; None: all
    """

    name: str
    size: int
    cut: VectorCut | None = None

    @property
    def whole(self) -> int:
        """Return the number of items in the file."""
        return self.size if self.cut is None else self.cut.whole


def squeezed(shape: Shape) -> Shape:
    """Return the axes of more than one item."""
    return tuple(size for size in shape if size != 1)
