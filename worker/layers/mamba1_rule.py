"""What a Mamba-1 layer computes between its linears, in torch, token by token: the definition of
the compiled kernels. There are two parts, because linears read the result of the convolution. Each
part changes its own numbers of a state.

Legend: T tokens of the step, R rows, N tokens of each row, C channels, S state, as in Mamba1Spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from worker.layers.recurrence import advance, convolved
from worker.slots.states import StepStates
from worker.spec.recurrent import Mamba1Spec


@dataclass(frozen=True, slots=True)
class Mamba1Weights:
    """The weights of a Mamba-1 layer beside its linears and norms. All are float32.

    conv        [kernel, C], oldest token first
    conv_bias   [C]; None: nothing is added to the convolution
    decay       [C, S] the factor A, below zero
    bias        [C] is added to the projected dt
    skip        [C] the factor D
    """

    conv: Tensor
    conv_bias: Tensor | None
    decay: Tensor
    bias: Tensor
    skip: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield self.conv
        if self.conv_bias is not None:
            yield self.conv_bias
        yield from (self.decay, self.bias, self.skip)


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """What the recurrence of a Mamba-1 layer reads of each token. All are float32.

    x      [T, C] the result of the convolution
    step   [T, C] the projected dt
    b, c   [T, S] B and C
    gate   [T, C]
    """

    x: Tensor
    step: Tensor
    b: Tensor
    c: Tensor
    gate: Tensor


def mamba1_conv(
    spec: Mamba1Spec, weights: Mamba1Weights, inputs: Tensor, states: StepStates, offset: int
) -> Tensor:
    """Compute the convolution of a step, and change the tails of its rows. Arguments and result are
    those of `Kernels.mamba1_conv`."""
    out = torch.zeros_like(inputs)

    def compute(tokens: Tensor, held: Tensor) -> None:
        """Write the convolution of `tokens` [R, N], indexes in the step, and change `held` [R,
        items], the tails of the rows."""
        tail = held.view(len(held), spec.kernel - 1, spec.conv_width)
        out[tokens] = convolved(inputs[tokens], tail, weights.conv)

    advance(states, offset, spec.tail_items, compute)
    return silu(out if weights.conv_bias is None else out.add_(weights.conv_bias))


def mamba1_scan(
    spec: Mamba1Spec, weights: Mamba1Weights, inputs: ScanInputs, states: StepStates, offset: int
) -> Tensor:
    """Compute the recurrence of a step, and change the matrices of its rows. Arguments and result
    are those of `Kernels.mamba1_scan`."""
    out = torch.zeros_like(inputs.x)
    step = softplus(inputs.step + weights.bias)
    added = step * inputs.x

    def compute(tokens: Tensor, held: Tensor) -> None:
        """Write the results of `tokens` [R, N], indexes in the step, and change `held` [R, items],
        the matrices of the rows."""
        state = held.view(len(held), spec.channels, spec.state)
        for at in tokens.unbind(1):
            state.mul_((step[at, :, None] * weights.decay).exp_())
            state.add_(added[at, :, None] * inputs.b[at, None, :])
            out[at] = (state @ inputs.c[at, :, None])[..., 0]

    advance(states, offset + spec.tail_items, spec.matrix_items, compute)
    return out.add_(weights.skip * inputs.x).mul_(silu(inputs.gate))
