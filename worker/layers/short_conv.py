"""A short convolution between two gates: the token mixer of most layers of LFM2.

Legend in short_conv_rule.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from worker.kernels.base import Kernels
from worker.layers.linear import Linear
from worker.layers.low_rank import LayerAdapters, adapted
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
        """Return the result [T, hidden] for x [T, hidden], and change the states.

        offset   index of the layer's first number in a state
        """
        inputs = adapted(adapters, "qkv", x, self.inputs(x)).float()
        compute = partial(kernels.short_conv, self.spec, self.conv, self.bias, inputs)
        result = compute(states, offset).to(x.dtype)
        states.on_accepted(lambda accepted: compute(accepted, offset))
        return adapted(adapters, "output", result, self.output(result))

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
