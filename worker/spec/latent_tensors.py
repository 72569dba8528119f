"""The tensors of latent attention in a model's files. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from worker.spec.matrices import FusedMatrix, NormTensor, Shape
from worker.spec.model_spec import AttentionSpec
from worker.spec.tensor_parts import TensorParts


@dataclass(frozen=True, slots=True)
class LatentAttentionTensors:
    """The tensors of a layer's latent attention (layers/latent_attention.py).

    up         [H * (plain + value_dim), R] of each head the matrix of its keys, transposed, and
               then that of its values; None: the files have these apart
    key_up     [R, plain] of each head
    value_up   [value_dim, R] of each head
    """

    inputs: FusedMatrix
    q_norm: NormTensor | None
    queries: FusedMatrix | None
    kv_norm: NormTensor
    up: FusedMatrix | None
    key_up: tuple[FusedMatrix, ...]
    value_up: tuple[FusedMatrix, ...]
    output: FusedMatrix

    @property
    def matrices(self) -> tuple[FusedMatrix, ...]:
        some = (self.inputs, self.queries, self.up, *self.key_up, *self.value_up, self.output)
        return tuple(matrix for matrix in some if matrix is not None)

    @property
    def norms(self) -> tuple[NormTensor, ...]:
        return (self.kv_norm,) if self.q_norm is None else (self.q_norm, self.kv_norm)

    @property
    def float_items(self) -> int:
        return 0

    @property
    def dense(self) -> tuple[FusedMatrix, ...]:
        return ()

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
        key_up: tuple[FusedMatrix, ...] = ()
        value_up: tuple[FusedMatrix, ...] = ()
        if "latent_up" in self.names:
            rows = heads * (latent.plain + latent.value_dim)
            up = FusedMatrix((self._part("latent_up", rows, index),), latent.rank)
        else:
            key_up = self._of_heads("key_up", index, heads, latent.rank, latent.plain)
            value_up = self._of_heads("value_up", index, heads, latent.value_dim, latent.rank)
        output = self._part("output", hidden, index)
        return LatentAttentionTensors(
            inputs=FusedMatrix((first, held), hidden, attention.qkv_bias),
            q_norm=q_norm,
            queries=queries,
            kv_norm=NormTensor(self.names.roles["latent_norm"].format(i=index), latent.rank),
            up=up,
            key_up=key_up,
            value_up=value_up,
            output=FusedMatrix((output,), attention.result_width, attention.output_bias),
        )

    def _of_heads(
        self, role: str, index: int, heads: int, rows: int, columns: int
    ) -> tuple[FusedMatrix, ...]:
        """Return the matrix of each head, of a tensor that holds those of all heads."""
        return tuple(
            FusedMatrix((self._part(role, rows, index, head, heads),), columns)
            for head in range(heads)
        )
