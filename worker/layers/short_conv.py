"""A short convolution between two gates: the token mixer of most layers of LFM2.

Legend: T tokens of the step, R rows, N tokens of each row, C width of the convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels.base import Kernels
from worker.layers.linear import Linear
from worker.layers.low_rank import LayerAdapters, adapted
from worker.layers.recurrence import advance, convolved
from worker.slots.states import StepStates
from worker.spec.recurrent import ShortConvSpec


@dataclass(slots=True)
class ShortConv:
    """The weights of a short convolution.

    inputs   makes the gate B, the gate C and the input x: [T, 3 C]
    conv     [kernel, C] float32, oldest token first
    bias     [C] float32, added to the result of the convolution; None: nothing is
    """

    spec: ShortConvSpec
    inputs: Linear
    conv: Tensor
    bias: Tensor | None
    output: Linear

    def __call__(
        self,
        x: Tensor,
        kernels: Kernels,
        states: StepStates,
        offset: int,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """Return the result [T, hidden] for x [T, hidden], and change the states. The kernels are
        not used, because torch computes the convolution.

        offset   index of the layer's first number in a state
        """
        inputs = adapted(adapters, "qkv", x, self.inputs(x)).float()
        before, after, inner = inputs.chunk(3, dim=1)
        gated = before * inner
        out = self.convolve(gated, states, offset)
        states.on_accepted(lambda accepted: self.convolve(gated, accepted, offset))
        mixed = out.mul_(after).to(x.dtype)
        return adapted(adapters, "output", mixed, self.output(mixed))

    def convolve(self, x: Tensor, states: StepStates, offset: int) -> Tensor:
        """Return the convolution [T, C] of x [T, C] float32 with the tokens before it, and change
        the states. Only the results of the rows of `states` are set."""
        spec, out = self.spec, torch.empty_like(x)

        def compute(tokens: Tensor, held: Tensor) -> None:
            tail = held.view(len(held), spec.kernel - 1, spec.conv_width)
            out[tokens] = convolved(x[tokens], tail, self.conv)

        advance(states, offset, spec.state_items, compute)
        return out if self.bias is None else out.add_(self.bias)

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear."""
        return [(self, "inputs"), (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.inputs, self.output):
            yield from linear.tensors()
        yield self.conv
        if self.bias is not None:
            yield self.bias
