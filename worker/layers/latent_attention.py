"""Latent attention (MLA): the cache stores a latent and a rotated key of each token, and all heads
share them (`LatentSpec`).

The matrices of the keys and of the values are never applied to what is stored. A query is
multiplied by the matrix of its head's keys before it is compared with latents, and a sum of latents
by the matrix of the values. So a step reads the latent of each token once, and a position has the
same result in a chunk as alone.

Legend: T tokens of the step, H heads, R numbers of a latent, P of the rotated part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels.base import Kernels
from worker.kernels.reference import turn_heads
from worker.layers.attention_run import AttentionRun
from worker.layers.indexer import Indexer
from worker.layers.linear import HeadLinears, Linear
from worker.layers.low_rank import LayerAdapters, adapted
from worker.layers.norm import Norm
from worker.layers.rope import CosSin
from worker.spec.latent import LatentSpec
from worker.spec.model_spec import AttentionSpec


@dataclass(slots=True)
class LatentAttention:
    """Weights of a layer's latent attention.

    inputs      makes the vector for the queries, or the queries, and then the latent and the key
                that is rotated, [.., hidden]
    q_norm      of the vector for the queries. None: the queries are made of the hidden states
    queries     makes the queries of that vector: of each head those that are not rotated, and then
                those that are
    key_up      of each head, [R, plain]
    value_up    of each head, [value_dim, R]
    indexer     selects the tokens whose latents are read; None: those of all tokens are
    """

    spec: AttentionSpec
    inputs: Linear
    q_norm: Norm | None
    queries: Linear | None
    kv_norm: Norm
    key_up: HeadLinears
    value_up: HeadLinears
    output: Linear
    indexer: Indexer | None = None

    @property
    def latent(self) -> LatentSpec:
        assert self.spec.latent is not None
        return self.spec.latent

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear but those of heads."""
        queries = [] if self.queries is None else [(self, "queries")]
        indexer = [] if self.indexer is None else self.indexer.linears
        return [(self, "inputs"), *queries, *indexer, (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        parts = (self.inputs, self.q_norm, self.queries, self.kv_norm, self.key_up, self.value_up)
        for part in (*parts, self.output, self.indexer):
            if part is not None:
                yield from part.tensors()

    def __call__(
        self, x: Tensor, kernels: Kernels, run: AttentionRun, terms: LayerAdapters | None
    ) -> Tensor:
        """Return the attention [T, hidden] of x [T, hidden], after the step's latents are
        written."""
        spec, latent = self.spec, self.latent
        made = adapted(terms, "qkv", x, self.inputs(x))
        first, held, key = made.tensor_split(
            [made.shape[1] - latent.head_dim, made.shape[1] - latent.rotated], dim=1
        )
        selected: Tensor | None = None
        if self.queries is not None and self.q_norm is not None:
            normed = kernels.add_norm(first.contiguous(), None, self.q_norm)
            if self.indexer is not None:
                selected = self.indexer(x, normed, kernels, run)
            first = self.queries(normed)
        q = self._queries(first.view(len(x), spec.num_heads, latent.query_dim), run)
        stored = x.new_empty(len(x), 1, latent.head_dim)
        stored[:, 0, : latent.rank] = kernels.add_norm(held.contiguous(), None, self.kv_norm)
        stored[:, 0, latent.rank :] = key
        self._turn(stored[..., latent.rank :], run.angles)
        run.cache.write(run.place, stored, None, run.slots)
        if run.selection is None or selected is None:
            seen = run.attention.run(q, *run.cache.layer(run.place), run.plan, scale=spec.scale)
        else:
            latents, _ = run.cache.layer(run.place)
            seen = run.selection.attend(q, latents, selected, run.attention, scale=spec.scale)
        # The values are the latents: the rest of a stored head is not one.
        sums = seen[..., : latent.rank].transpose(0, 1).contiguous()
        results = self.value_up(sums).transpose(0, 1).flatten(1)
        return adapted(terms, "output", results, self.output(results))

    def _queries(self, heads: Tensor, run: AttentionRun) -> Tensor:
        """Return the queries [T, H, R + P] for heads [T, H, query_dim]."""
        latent = self.latent
        q = heads.new_empty(*heads.shape[:2], latent.head_dim)
        plain = heads[..., : latent.plain].transpose(0, 1).contiguous()
        q[..., : latent.rank] = self.key_up(plain).transpose(0, 1)
        q[..., latent.rank :] = heads[..., latent.plain :]
        self._turn(q[..., latent.rank :], run.angles)
        return q if run.factors is None else q.mul_(run.factors)

    def _turn(self, heads: Tensor, angles: CosSin | None) -> None:
        """Rotate heads [T, N, P] in place. Neighbours that are rotated together become items of the
        first and of the second half: the products of queries and keys stay the same."""
        if self.latent.turns_neighbours:
            heads.copy_(torch.cat([heads[..., ::2], heads[..., 1::2]], dim=-1))
        turn_heads(heads, angles)
