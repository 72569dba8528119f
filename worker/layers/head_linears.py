"""Linears of heads: each head's vectors are multiplied by a matrix of its own. kernels/packed.py
has them with packed weights.

Legend: H heads, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.layers.linear import Dense, Linear


class HeadLinears(Protocol):
    """A linear of each head.

    heads   the linears, which have equal sizes and no biases
    """

    @property
    def heads(self) -> Sequence[Linear]: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs [H, T, out] for x [H, T, in], in the dtype of x."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the weights."""
        ...


@dataclass(slots=True)
class DenseHeads:
    """Linears of heads with dense weights.

    weight   [H, out, in]
    """

    weight: Tensor

    @property
    def heads(self) -> Sequence[Linear]:
        return [Dense(each) for each in self.weight]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight.transpose(1, 2))

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight
