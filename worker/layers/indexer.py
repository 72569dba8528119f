"""The indexer of latent attention, which selects the tokens that a token sees (`IndexerSpec`).

Published kernels transform index queries and keys with a Hadamard matrix and round them to eight
bits. The transform leaves their products as they are, and nothing is rounded here.

Legend: T tokens of the step, H index heads, D numbers of an index query and of an index key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.kernels.base import Kernels
from worker.kernels.reference import turn_heads
from worker.layers.attention_run import AttentionRun
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.spec.latent import IndexerSpec


@dataclass(slots=True)
class Indexer:
    """Weights of a layer's indexer.

    queries   makes the index queries of the vector for the queries, [H * D, query_rank]
    keys      makes the index keys, [D, hidden]
    weights   makes the weights of the heads, [H, hidden]
    """

    spec: IndexerSpec
    queries: Linear
    keys: Linear
    key_norm: Norm
    weights: Linear

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear except that which stays dense."""
        return [(self, "queries"), (self, "keys")]

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.queries, self.keys, self.key_norm, self.weights):
            yield from part.tensors()

    def __call__(
        self, x: Tensor, query_vectors: Tensor, kernels: Kernels, run: AttentionRun
    ) -> Tensor | None:
        """Write the step's index keys, and return the positions of the tokens that each token sees
        (`Selection.positions`). Return None if the step has no selection: they see all.

        x               [T, hidden] the layer's input
        query_vectors   [T, query_rank] that of which the queries are made
        """
        spec, place = self.spec, run.place + 1
        keys = kernels.add_norm(self.keys(x), None, self.key_norm).view(-1, 1, spec.dim)
        turn_heads(keys, run.angles)
        run.cache.write(place, keys, None, run.slots)
        if run.selection is None:
            return None
        queries = self.queries(query_vectors).view(-1, spec.heads, spec.dim)
        turn_heads(queries, run.angles)
        weights = self.weights.to_float(x).mul_((spec.heads * spec.dim) ** -0.5)
        return run.selection.positions(queries, weights, run.cache.layer(place)[0], kernels)
