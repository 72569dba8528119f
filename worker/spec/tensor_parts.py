"""The parts of a model's matrices: their names in the files, and what a rank reads of them.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from worker.spec.matrices import FusedMatrix, MatrixPart, NormTensor, VectorTensor
from worker.spec.model_spec import MlpSpec, ModelSpec
from worker.spec.share import MatrixCut, Share, VectorCut
from worker.spec.tensor_names import ENDINGS, XIELU_ROLES, TensorNames


class TensorParts:
    """Makes the parts of a model's matrices, and its norms and vectors.

    spec    what is computed with the tensors: by the whole model, or by the rank
    share   the rank's share; None: the whole model
    """

    def __init__(self, spec: ModelSpec, names: TensorNames, share: Share | None = None) -> None:
        self.spec = spec
        self.names = names
        self.share = share

    def _norm(self, role: str, index: int) -> NormTensor:
        name = self.names.roles[role].format(i=index)
        ending = self.names.endings.get(role, ENDINGS)[0]
        return NormTensor(name, self.spec.hidden, self.spec.norm.bias, ending=ending)

    def _qk_norm(
        self, role: str, index: int, heads: int, head_dim: int, by_head: bool
    ) -> NormTensor:
        name = self.names.roles[role].format(i=index)
        if by_head:
            return NormTensor(name, head_dim)
        return NormTensor(name, heads * head_dim, cut=self._vector_cut(heads * head_dim))

    def _sinks(self, index: int, heads: int) -> VectorTensor:
        return VectorTensor(self._name("sinks", index), heads, self._vector_cut(heads))

    def _xielu(self, mlp: MlpSpec | None, index: int) -> tuple[VectorTensor, ...]:
        if mlp is None or mlp.activation != "xielu" or mlp.xielu is not None:
            return ()
        return tuple(VectorTensor(self._name(role, index), 1) for role in XIELU_ROLES)

    def _name(self, role: str, index: int, *, is_bias: bool = False) -> str:
        """Return the whole name of a tensor that is no matrix of linear layers."""
        ending = self.names.endings.get(role, ENDINGS)[is_bias]
        return self.names.roles[role].format(i=index) + ending

    def _vector_cut(self, size: int) -> VectorCut | None:
        """Return this rank's part of a vector that is divided among the ranks, `size` items on
        each. Return None if the model is not divided; all items are read then."""
        if self.share is None:
            return None
        (items,) = self.share.ranges([size])
        return VectorCut(items, size * self.share.size)

    def _by_token(self, role: str) -> MatrixPart:
        """Return a matrix with a row for each token, of which a rank holds those of its tokens."""
        vocab, share = self.spec.vocab_size, self.share
        if share is None:
            return MatrixPart(self.names.roles[role], vocab)
        hidden, tokens = self.spec.hidden, share.vocabulary
        cut = MatrixCut((tokens,), range(hidden), (vocab, hidden))
        return MatrixPart(self.names.roles[role], len(tokens), cut=cut)

    def _parts(
        self, index: int, sections: Mapping[str, Sequence[int]], columns: int
    ) -> tuple[MatrixPart, ...]:
        """Return the parts of a matrix of which a rank holds some rows.

        sections   role -> rows of each section of the tensor
        """
        return tuple(
            replace(self._part(role, sum(rows), index), cut=self._row_cut(rows, columns))
            for role, rows in sections.items()
        )

    def _by_head(
        self, index: int, role: str, heads: int, widths: Sequence[int], *, columns: int
    ) -> tuple[MatrixPart, ...]:
        """Return the parts of a tensor that stores one head after the other, and in each head the
        rows of several matrices.

        widths   rows of a head for each of the matrices
        """
        assert self.share is None, "such a tensor is not divided among ranks"
        stride, first, parts = sum(widths), 0, []
        for width in widths:
            starts = range(first, heads * stride, stride)
            rows = tuple(range(start, start + width) for start in starts)
            cut = MatrixCut(rows, range(columns), (heads * stride, columns))
            parts.append(replace(self._part(role, heads * width, index), cut=cut))
            first += width
        return tuple(parts)

    def _row_cut(self, sections: Sequence[int], columns: int) -> MatrixCut | None:
        share = self.share
        if share is None:
            return None
        whole = (sum(sections) * share.size, columns)
        return MatrixCut(share.ranges(sections), range(columns), whole)

    def _summed(self, index: int, role: str, columns: int, has_bias: bool) -> FusedMatrix:
        """Return a matrix of which a rank holds `columns` columns. The ranks add their results, so
        only one of them has the bias."""
        hidden, share = self.spec.hidden, self.share
        part = self._part(role, hidden, index)
        if share is None:
            return FusedMatrix((part,), columns, has_bias)
        (own,) = share.ranges([columns])
        cut = MatrixCut((range(hidden),), own, (hidden, columns * share.size))
        return FusedMatrix((replace(part, cut=cut),), columns, has_bias and share.is_first)

    def _part(
        self, role: str, rows: int, index: int, expert: int | None = None, of: int = 1
    ) -> MatrixPart:
        names, template = self.names, self.names.roles[role]
        is_stacked = expert is not None and "{e}" not in template
        name, endings = template.format(i=index, e=expert), names.endings.get(role, ENDINGS)
        return MatrixPart(
            name=name,
            rows=rows,
            order=names.orders.get(role),
            is_transposed=role in names.transposed and name + endings[0] not in names.by_rows,
            index=expert if is_stacked else None,
            of=of,
            endings=endings,
        )
