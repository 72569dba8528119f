"""Per-layer inputs, as Gemma 3n and 4 have them: numbers of the token that each layer adds to its
hidden states, after it has chosen among them (`LayerInputsSpec`).

Legend: T tokens of the step, L layers, P numbers of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels.base import Kernels
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear
from worker.layers.norm import Norm
from worker.spec.model_spec import LayerInputsSpec, MlpSpec


@dataclass(slots=True)
class InputTable:
    """What makes the inputs of all layers.

    table     returns rows [T, L * P]
    project   [T, hidden] to [T, L * P]
    norm      over the P numbers of a layer
    """

    spec: LayerInputsSpec
    table: Embedding
    project: Linear
    norm: Norm

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return the inputs [T, L, P] of token_ids [T] int64. `embedded` [T, hidden] are the
        embeddings of the tokens."""
        spec, shape = self.spec, (len(token_ids), -1, self.spec.width)
        # Rounded to the model's dtype, as in training.
        scale = float(torch.tensor(spec.table_scale, dtype=embedded.dtype))
        if spec.others_read_first:
            token_ids = token_ids.where(token_ids < spec.table_rows, 0)
        rows = self.table(token_ids).mul_(scale).view(shape)
        projected = self.norm(self.project(embedded).mul_(spec.projection_scale).view(shape))
        return projected.add_(rows).mul_(spec.sum_scale)

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.table, self.project, self.norm):
            yield from part.tensors()


@dataclass(slots=True)
class InputGate:
    """What one layer does with its inputs.

    spec      of a gated MLP with the same activation
    gate      [T, hidden] to [T, P]
    project   [T, P] to [T, hidden]
    norm      of the result
    """

    spec: MlpSpec
    gate: Linear
    project: Linear
    norm: Norm

    def __call__(self, x: Tensor, inputs: Tensor, kernels: Kernels) -> Tensor:
        """Return the result [T, hidden] before its norm, for the hidden states x [T, hidden].

        inputs   [T, P] the layer's inputs
        """
        both = torch.cat([self.gate(x), inputs], dim=1)
        return self.project(kernels.activate(both, self.spec))

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear."""
        return [(self, "gate"), (self, "project")]

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.gate, self.project, self.norm):
            yield from part.tensors()
