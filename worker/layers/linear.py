"""The interfaces of linear layers and of linears of heads, and dense linear layers in torch.

kernels/packed.py implements the interfaces with packed weights. Legend: N rows, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.nn.functional import linear


@runtime_checkable
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


@runtime_checkable
class HeadLinears(Protocol):
    """A linear of each head: its vectors are multiplied by a matrix of its own.

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


def linears_in(part: object) -> Iterator[Linear]:
    """Yield every linear of a part of a model: of a dataclass of parts, of a sequence of them, of
    heads, or a linear itself. Other objects, such as tensors, have none."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, HeadLinears):
        yield from part.heads
    elif isinstance(part, Sequence) and not isinstance(part, str):
        for each in part:
            yield from linears_in(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from linears_in(getattr(part, field.name))
