"""What an RG-LRU layer computes between its linears, in torch, token by token: the definition of
the compiled kernels. There are two parts, because linears read the result of the convolution. Each
part changes its own numbers of a state.

Legend: T tokens of the step, R rows, N tokens of each row, H heads, D channels of a head, C = H * D
channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.layers.activation import ACTIVATIONS
from worker.layers.recurrence import advance, convolved
from worker.slots.states import StepStates
from worker.spec.recurrent import RgLruSpec


@dataclass(frozen=True, slots=True)
class LruWeights:
    """The weights of an RG-LRU layer beside its linears. All are float32.

    conv         [kernel, C], oldest token first
    conv_bias    [C]
    decay        [C] factor of the logarithm of the decay, below zero
    input_bias   [C] is added to the gates of the inputs
    decay_bias   [C] is added to the gates of the decays
    """

    conv: Tensor
    conv_bias: Tensor
    decay: Tensor
    input_bias: Tensor
    decay_bias: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.conv, self.conv_bias, self.decay, self.input_bias, self.decay_bias)


@dataclass(frozen=True, slots=True)
class LruInputs:
    """What the recurrence of an RG-LRU layer reads of each token. All are float32.

    x       [T, C] the result of the convolution
    gates   [H, T, 2 D] those of the inputs and those of the decays, before their biases
    gate    [T, C] of the results, before its activation
    """

    x: Tensor
    gates: Tensor
    gate: Tensor


def rg_lru_conv(
    spec: RgLruSpec, weights: LruWeights, inputs: Tensor, states: StepStates, offset: int
) -> Tensor:
    """Compute the convolution of a step, and change the tails of its rows. Arguments and result are
    those of `Kernels.rg_lru_conv`."""
    out = torch.zeros_like(inputs)

    def compute(tokens: Tensor, held: Tensor) -> None:
        """Write the convolution of `tokens` [R, N], indexes in the step, and change `held` [R,
        items], the tails of the rows."""
        tail = held.view(len(held), spec.kernel - 1, spec.conv_width)
        out[tokens] = convolved(inputs[tokens], tail, weights.conv)

    advance(states, offset, spec.tail_items, compute)
    return out.add_(weights.conv_bias)


def rg_lru_scan(
    spec: RgLruSpec, weights: LruWeights, inputs: LruInputs, states: StepStates, offset: int
) -> Tensor:
    """Compute the recurrence of a step, and change the numbers of its rows. Arguments and result
    are those of `Kernels.rg_lru_scan`."""
    out = torch.zeros_like(inputs.x)
    of_inputs, of_decays = (
        each.transpose(0, 1).flatten(1) for each in inputs.gates.chunk(2, dim=2)
    )
    logs = (of_decays + weights.decay_bias).sigmoid().mul_(weights.decay)
    decays, shares = logs.exp(), logs.mul_(2).expm1_().neg_().sqrt_()  # sqrt(1 - decay ** 2)
    firsts = torch.from_numpy(states.first_tokens).to(out.device)
    decays[firsts], shares[firsts] = 0.0, 1.0
    added = (of_inputs + weights.input_bias).sigmoid().mul_(inputs.x).mul_(shares)

    def compute(tokens: Tensor, held: Tensor) -> None:
        """Write the results of `tokens` [R, N], indexes in the step, and change `held` [R, C]."""
        for at in tokens.unbind(1):
            held.mul_(decays[at]).add_(added[at])
            out[at] = held

    advance(states, offset + spec.tail_items, spec.width, compute)
    return out.mul_(ACTIVATIONS[spec.activation](inputs.gate))
