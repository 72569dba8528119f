"""Linear layers by the form of their weights: dense tensors through torch, or packed ones through
the compiled kernels (kernels/packed.py). A model does not know which it has.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import linear


class Linear(Protocol):
    @property
    def num_weights(self) -> int:
        """Numbers in matrix and bias, as the model's makers count them."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        ...

    def to_float(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out] float32."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All memory that it holds."""
        ...


@dataclass(slots=True)
class Dense:
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_weights(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors())

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def to_float(self, x: Tensor) -> Tensor:
        return self(x).float()

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight
        if self.bias is not None:
            yield self.bias
