"""The activations without numbers of their own, in torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from worker.spec.model_spec import Activation


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return relu(x).square_()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}
