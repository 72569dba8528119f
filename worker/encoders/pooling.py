"""Converts the hidden states of an input's tokens to the input's vector: pooling, dense layers, and
normalising, as in the modules of a sentence-transformers directory.

Legend: T tokens in the step, N inputs in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, normalize

from protocol.engine.encoding import Pooling
from worker.encoders.ragged import RaggedBatch
from worker.layers.linear import Dense

DENSE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": gelu,
    "relu": torch.relu,
}
"""Name of an activation -> its function."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A dense layer after pooling, in float32."""

    linear: Dense
    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        return DENSE_ACTIVATIONS[self.activation](self.linear(x))


@dataclass(frozen=True, slots=True)
class VectorHead:
    """Everything after the hidden states of a model that gives vectors."""

    pooling: Pooling
    dense: Sequence[DenseModule] = ()
    normalizes: bool = False

    def __call__(
        self, hidden: Tensor, batch: RaggedBatch, norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the vectors [N, size] float32 of hidden [T, hidden].

        norm   the model's final norm, if it has not been applied to `hidden` yet
        """
        if norm is not None and self.pooling == "mean":
            hidden, norm = norm(hidden), None
        x = pool(hidden, batch, self.pooling)
        if norm is not None:
            x = norm(x)  # of one token per input, instead of all
        for module in self.dense:
            x = module(x)
        return normalize(x, dim=-1) if self.normalizes else x


@dataclass(frozen=True, slots=True)
class PairScoreHead:
    """Everything after the hidden states of a decoder that scores.

    weight   [1, hidden] float32
    """

    weight: Tensor
    has_sigmoid: bool = True

    def __call__(
        self, hidden: Tensor, batch: RaggedBatch, norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the scores [N, 1] float32 of hidden [T, hidden]: those of the last tokens.

        norm   the model's final norm, if it has not been applied to `hidden` yet
        """
        x = pool(hidden, batch, "last")
        score = linear(x if norm is None else norm(x), self.weight)
        return score.sigmoid() if self.has_sigmoid else score


InputHead = VectorHead | PairScoreHead
"""Computes the results of inputs from a decoder's hidden states."""


def pool(hidden: Tensor, batch: RaggedBatch, pooling: Pooling) -> Tensor:
    """Return one vector for each input, [N, hidden] float32: that of its first or last token, or
    the mean of all."""
    match pooling:
        case "cls":
            return hidden.index_select(0, batch.starts).float()
        case "last":
            return hidden.index_select(0, batch.ends - 1).float()
        case "mean":
            sums = torch.zeros(
                (len(batch.starts), hidden.shape[1]), dtype=torch.float32, device=hidden.device
            )
            sums.index_add_(0, batch.input_of_token, hidden.float())
            return sums / (batch.ends - batch.starts)[:, None]
