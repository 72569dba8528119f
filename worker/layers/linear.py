"""Linear layers, either with dense weights through torch or packed ones through the compiled
kernels (kernels/packed.py). A model works with both.

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
        """Numbers in the matrix and bias, without padding."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        ...

    def to_float(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out] float32."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield all memory that the layer holds."""
        ...


@dataclass(slots=True)
class Dense:
    """A linear layer with dense weights: weight [out, in], bias [out] or None."""

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
