"""BitNet's linear layers: weights of -1, 0 and 1 with one factor for a matrix, and inputs that are
rounded to 8 bits for each token. The model was trained with them.

A checkpoint has packed weights ("offline": four in a byte) or those of the training ("online"),
which are rounded when they are loaded. Here both are stored in the model's dtype, and the matrix is
multiplied as in a dense model. transformers computes the same, but needs a compiler for it.

Legend: T tokens, I inputs and O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from worker.errors import FETCH_AGAIN, UnusableModel

PER_BYTE = 4
"""Packed weights in a byte, of two bits each. Byte row r has the rows r, r + O/4, r + O/2 ..."""
FACTOR = "_scale"
"""End of the name of a matrix's factor, after the matrix's own name."""
LEAST = 1e-5
"""The least size of the numbers that are divided by, as in training."""


class BitLinear(nn.Module):
    """A linear layer of BitNet.

    weight   [O, I], numbers of -1, 0 and 1; or these, multiplied by the factor
    bias     [O], added before the factor is applied; None: none
    factor   [1], multiplies the result
    """

    factor: Tensor

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, factor: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self.register_buffer("factor", factor)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs [T, O] of inputs [T, I]."""
        rounded = _rounded_inputs(inputs)
        return nn.functional.linear(rounded, self.weight, self.bias) * self.factor


def _rounded_inputs(inputs: Tensor) -> Tensor:
    """Return inputs [T, I], rounded to the multiples of 1/127 of each token's largest number."""
    wide = inputs.float()
    scale = 127 / wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return ((wide * scale).round().clamp(-128, 127) / scale).to(inputs.dtype)


def _rounded_weight(weight: Tensor) -> Tensor:
    """Return weights [O, I] of the training as -1, 0 and 1, times the mean of their sizes."""
    wide = weight.float()
    scale = 1 / wide.abs().mean().clamp(min=LEAST)
    return ((wide * scale).round().clamp(-1, 1) / scale).to(weight.dtype)


def unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return packed weights [O/4, I] as -1, 0 and 1, [O, I]."""
    parts = [(packed >> (2 * place)) & 3 for place in range(PER_BYTE)]
    return torch.cat(parts).to(dtype) - 1


def read_packed(
    paths: list[Path], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a packed checkpoint in `dtype`, with their weights unpacked, and the
    factors of these matrices by the matrices' names."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in load_file(path).items():
            is_packed = tensor.dtype == torch.uint8
            tensors[name] = unpacked(tensor, dtype) if is_packed else tensor.to(dtype)
    names = [name for name in tensors if name.endswith(f".weight{FACTOR}")]
    return tensors, {name.removesuffix(FACTOR): tensors.pop(name) for name in names}


def install(model: Any, factors: Mapping[str, Tensor] | None) -> None:
    """Replace the linear layers of a BitNet model, except its head.

    factors   factor of each packed matrix; None: the weights are those of the training

    Raises UnusableModel if a factor is missing, or belongs to no layer.
    """
    head = model.get_output_embeddings()
    rest = dict(factors or {})
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and each is not head
    }
    for name, layer in layers.items():
        factor, weight = layer.weight.new_ones(1), layer.weight.detach()
        if factors is None:
            weight = _rounded_weight(weight)
        else:
            factor = _factor(f"{name}.weight", rest)
        model.set_submodule(name, BitLinear(weight, layer.bias, factor.to(weight.dtype)))
    for name in rest:
        raise UnusableModel(f"tensor {name + FACTOR!r} is not a tensor of the model")


def _factor(name: str, factors: dict[str, Tensor]) -> Tensor:
    factor = factors.pop(name, None)
    if factor is None:
        raise UnusableModel(
            f"tensor {name + FACTOR!r} is missing from the files", remedy=FETCH_AGAIN
        )
    if factor.numel() != 1:
        raise UnusableModel(f"tensor {name + FACTOR!r} has another shape than (1,)")
    return factor.reshape(1)
