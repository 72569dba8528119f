"""The tensors of latent attention in a model's files. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from worker.spec.latent import LatentSpec
from worker.spec.matrices import FusedMatrix, MatrixPart, NormTensor, Shape
from worker.spec.model_spec import AttentionSpec
from worker.spec.share import MatrixCut
from worker.spec.tensor_parts import TensorParts


@dataclass(frozen=True, slots=True)
class IndexerTensors:
    """The tensors of an indexer (layers/indexer.py).

    queries   [heads * dim, query_rank]
    keys      [dim, hidden]
    weights   [heads, hidden] stays dense
    """

    queries: FusedMatrix
    keys: FusedMatrix
    key_norm: NormTensor
    weights: FusedMatrix


@dataclass(frozen=True, slots=True)
class LatentAttentionTensors:
    """The tensors of a layer's latent attention (layers/latent_attention.py).

    key_up     [R, plain] of each head
    value_up   [value_dim, R] of each head
    up         [H * (plain + value_dim), R] the tensor that has both of each head, that of the keys
               transposed; None: they are in tensors of their own
    indexer    None: there is none
    """

    inputs: FusedMatrix
    q_norm: NormTensor | None
    queries: FusedMatrix | None
    kv_norm: NormTensor
    key_up: tuple[FusedMatrix, ...]
    value_up: tuple[FusedMatrix, ...]
    output: FusedMatrix
    up: FusedMatrix | None = None
    indexer: IndexerTensors | None = None

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        queries = () if self.queries is None else (self.queries,)
        indexer = () if self.indexer is None else (self.indexer.queries, self.indexer.keys)
        return self.inputs, *queries, *indexer, *self.key_up, *self.value_up, self.output

    @property
    def norms(self) -> tuple[NormTensor, ...]:
        indexer = () if self.indexer is None else (self.indexer.key_norm,)
        queries = () if self.q_norm is None else (self.q_norm,)
        return *queries, self.kv_norm, *indexer

    @property
    def float_items(self) -> int:
        return 0

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return () if self.indexer is None else (self.indexer.weights,)

    def others(self) -> Iterator[tuple[str, Shape]]:
        yield from ()


class LatentParts(TensorParts):
    """Makes the tensors of latent attention."""

    def _latent_attention(self, attention: AttentionSpec, index: int) -> LatentAttentionTensors:
        latent, heads, hidden = attention.latent, attention.num_heads, self.spec.hidden
        assert latent is not None
        assert self.share is None, "latent attention is not divided among ranks"
        made_of_queries = heads * latent.query_dim
        q_norm = queries = None
        if latent.query_rank:
            first = self._part("query_down", latent.query_rank, index)
            q_norm = NormTensor(self.names.roles["query_norm"].format(i=index), latent.query_rank)
            queries = FusedMatrix(
                (self._part("query_up", made_of_queries, index),), latent.query_rank
            )
        else:
            first = self._part("q", made_of_queries, index)
        held = self._part("latent_down", latent.head_dim, index)
        up: FusedMatrix | None = None
        if "latent_up" in self.names:
            rows = heads * (latent.plain + latent.value_dim)
            whole = self._part("latent_up", rows, index)
            up = FusedMatrix((whole,), latent.rank)
            key_up, value_up = _by_head(whole, latent)
        else:
            key_up = self._of_heads("key_up", index, heads, latent.rank, latent.plain)
            value_up = self._of_heads("value_up", index, heads, latent.value_dim, latent.rank)
        output = self._part("output", hidden, index)
        return LatentAttentionTensors(
            inputs=FusedMatrix((first, held), hidden, attention.qkv_bias),
            q_norm=q_norm,
            queries=queries,
            kv_norm=NormTensor(self.names.roles["latent_norm"].format(i=index), latent.rank),
            key_up=key_up,
            value_up=value_up,
            output=FusedMatrix((output,), attention.result_width, attention.output_bias),
            up=up,
            indexer=None if latent.indexer is None else self._indexer(latent, index),
        )

    def _indexer(self, latent: LatentSpec, index: int) -> IndexerTensors:
        spec, hidden = latent.indexer, self.spec.hidden
        assert spec is not None
        queries = self._part("index_queries", spec.heads * spec.dim, index)
        norm = self.names.roles["index_norm"].format(i=index)
        return IndexerTensors(
            queries=FusedMatrix((queries,), latent.query_rank),
            keys=FusedMatrix((self._part("index_keys", spec.dim, index),), hidden),
            key_norm=NormTensor(norm, spec.dim, has_bias=True),
            weights=FusedMatrix((self._part("index_weights", spec.heads, index),), hidden),
        )

    def _of_heads(
        self, role: str, index: int, heads: int, rows: int, columns: int
    ) -> tuple[FusedMatrix, ...]:
        """Return the matrix of each head, of a tensor that holds those of all heads."""
        return tuple(
            FusedMatrix((self._part(role, rows, index, head, heads),), columns)
            for head in range(heads)
        )


def _by_head(
    whole: MatrixPart, latent: LatentSpec
) -> tuple[tuple[FusedMatrix, ...], tuple[FusedMatrix, ...]]:
    """Return the matrices of the keys and those of the values, which are rows of one tensor."""
    keys, values, ranks = [], [], range(latent.rank)
    for first in range(0, whole.rows, latent.plain + latent.value_dim):
        middle, end = first + latent.plain, first + latent.plain + latent.value_dim
        # The tensor's rows are columns here, because the part is transposed.
        cut = MatrixCut((ranks,), range(first, middle), (latent.rank, whole.rows))
        part = replace(whole, rows=latent.rank, cut=cut, is_transposed=True)
        keys.append(FusedMatrix((part,), latent.plain))
        cut = MatrixCut((range(middle, end),), ranks, (whole.rows, latent.rank))
        values.append(FusedMatrix((replace(whole, rows=latent.value_dim, cut=cut),), latent.rank))
    return tuple(keys), tuple(values)
