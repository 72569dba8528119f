"""The interface of linear layers, and their dense implementation with torch.

kernels/packed.py implements the interface with packed weights. Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import linear


class Linear(Protocol):
    """A linear layer. The form of its weights depends on the class."""

    @property
    def num_weights(self) -> int:
        """Return how many numbers the matrix and the bias have, without padding."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [N, out] for x [N, in], in the dtype of x."""
        ...

    def to_float(self, x: Tensor) -> Tensor:
        """Return the output [N, out] for x [N, in], in float32."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the layer's weights."""
        ...


@dataclass(slots=True)
class Dense:
    """A linear layer with dense weights."""

    #: [out, in]
    weight: Tensor
    #: [out]
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
