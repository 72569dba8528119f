"""A Mamba-1 layer, the token mixer of most layers of Jamba, and of all of Mamba.

The convolution and the recurrence are two operations on the states, and the linears between them
compute all tokens of a step together. With drafts, each operation is computed once more with those
that were right. The linears are not, because their results do not depend on the states.

Legend in mamba1_rule.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker.kernels.base import Kernels
from worker.layers.linear import Linear
from worker.layers.low_rank import LayerAdapters, adapted
from worker.layers.mamba1_rule import Mamba1Weights, ScanInputs
from worker.layers.norm import Norm
from worker.slots.states import StepStates
from worker.spec.recurrent import Mamba1Spec


@dataclass(slots=True)
class Mamba1:
    """The weights of a Mamba-1 layer.

    inputs   makes x before the convolution, and the gate: [T, 2 C]
    made     makes of x the input of `step`, B and C
    norms    those of these three, float32; empty: there are none
    step     makes dt: [T, C]. Its bias is one of `weights`
    """

    spec: Mamba1Spec
    inputs: Linear
    made: Linear
    norms: tuple[Norm, ...]
    step: Linear
    weights: Mamba1Weights
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
        dtype = x.dtype
        inputs = adapted(adapters, "qkv", x, self.inputs(x)).float()
        before, gate = inputs.chunk(2, dim=1)
        convolve = partial(kernels.mamba1_conv, self.spec, self.weights, before)
        mixed = convolve(states, offset)
        states.on_accepted(lambda accepted: convolve(accepted, offset))
        made = torch.split(self.made.to_float(mixed.to(dtype)), self.spec.made_widths, dim=1)
        low_rank, b, c = (part.contiguous() for part in made)
        if self.norms:
            low_rank, b, c = (
                kernels.add_norm(part, None, norm)
                for part, norm in zip((low_rank, b, c), self.norms, strict=True)
            )
        step = self.step.to_float(low_rank.to(dtype))
        scanned = ScanInputs(mixed, step, b, c, gate)
        scan = partial(kernels.mamba1_scan, self.spec, self.weights, scanned)
        result = scan(states, offset).to(dtype)
        states.on_accepted(lambda accepted: scan(accepted, offset))
        return adapted(adapters, "output", result, self.output(result))

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear that need not stay dense."""
        return [(self, "inputs"), (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.inputs, self.made, self.step, self.output):
            yield from linear.tensors()
        for norm in self.norms:
            yield from norm.tensors()
        yield from self.weights.tensors()
