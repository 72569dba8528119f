"""A gated delta net: the token mixer of some layers of Qwen3-Next and Qwen3.5.

Legend in delta_rule.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from worker.kernels.base import Kernels
from worker.layers.linear import Linear
from worker.layers.low_rank import LayerAdapters, adapted
from worker.layers.norm import Norm
from worker.slots.states import StepStates
from worker.spec.recurrent import GatedDeltaSpec


@dataclass(slots=True)
class GatedDelta:
    """The weights of a gated delta net. All but those of the linears are float32.

    inputs   makes the queries, keys, values, and the output gates: [T, C + H * V]
    gates    makes beta and the decay of each value head: [T, 2 H]
    conv     [kernel, C], oldest token first
    decay    [H] factor of the decay, below zero
    bias     [H] is added to the projected decay
    norm     over the output of each head
    """

    spec: GatedDeltaSpec
    inputs: Linear
    gates: Linear
    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Norm
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
        spec = self.spec
        inputs = adapted(adapters, "qkv", x, self.inputs(x))
        qkv, gate = torch.split(inputs, [spec.conv_width, spec.value_width], dim=1)
        beta, step = self.gates(x).float().chunk(2, dim=1)
        beta, decay = beta.sigmoid(), softplus(step + self.bias).mul_(self.decay)
        compute = partial(kernels.gated_delta, spec, self.conv, qkv.float(), beta, decay)
        out = compute(states, offset)
        states.on_accepted(lambda accepted: compute(accepted, offset))
        normed = self.norm(out) * silu(gate.float()).view(out.shape)
        mixed = normed.flatten(1).to(x.dtype)
        return adapted(adapters, "output", mixed, self.output(mixed))

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear that need not stay dense."""
        return [(self, "inputs"), (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.inputs, self.gates, self.output):
            yield from linear.tensors()
        yield from (self.conv, self.decay, self.bias)
        yield from self.norm.tensors()
