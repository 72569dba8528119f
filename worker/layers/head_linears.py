"""Linears of heads (`HeadLinears`) with dense weights. kernels/packed.py has them with packed
weights.

Legend: H heads, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.layers.linear import Dense, Linear


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
