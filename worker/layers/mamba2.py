"""A Mamba-2 layer, the token mixer of most layers of Granite 4 H.

Legend in mamba2_rule.py.
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
from worker.layers.mamba2_rule import Mamba2Weights
from worker.slots.states import StepStates
from worker.spec.recurrent import Mamba2Spec


@dataclass(slots=True)
class Mamba2:
    """The weights of a Mamba-2 layer.

    inputs   makes the gate, x, B, C and dt: [T, H * P + C + H]
    """

    spec: Mamba2Spec
    inputs: Linear
    weights: Mamba2Weights
    output: Linear
    scales: Tensor | None = None

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
        if self.scales is not None:
            inputs = inputs * self.scales
        compute = partial(kernels.mamba2, self.spec, self.weights, inputs)
        result = compute(states, offset).to(x.dtype)
        states.on_accepted(lambda accepted: compute(accepted, offset))
        result = adapted(adapters, "output", result, self.output(result))
        scale = self.spec.result_scale
        return result if scale == 1.0 else result.mul_(scale)

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear that need not stay dense."""
        return [(self, "inputs"), (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.inputs, self.output):
            yield from linear.tensors()
        yield from self.weights.tensors()
        if self.scales is not None:
            yield self.scales


def input_scales(spec: Mamba2Spec, device: torch.device) -> Tensor | None:
    """Return the factor of each projected number; None if there are none."""
    if spec.input_scales is None:
        return None
    widths = torch.tensor(spec.input_widths, device=device)
    return torch.tensor(spec.input_scales, device=device).repeat_interleave(widths)
