"""A gated delta net: the token mixer of some layers of Qwen3-Next, Qwen3.5, OLMo Hybrid and Kimi
Linear.

Legend in delta_rule.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker.kernels.base import Kernels
from worker.layers.delta_rule import DeltaWeights
from worker.layers.linear import Linear
from worker.layers.low_rank import LayerAdapters, adapted
from worker.slots.states import StepStates
from worker.spec.recurrent import GatedDeltaSpec


@dataclass(slots=True)
class GatedDelta:
    """The weights of a gated delta net.

    inputs     makes the queries, keys, values, and the output gates: [T, C + H * V]; or what
               `decay_up` and `gate_up` read in place of the gates
    gates      makes what beta and the decay of each value head are made of: [T, 2 H]
    decay_up   makes what the decays are made of, [T, H * K], of numbers that `inputs` makes after
               the values; `gates` makes only those of beta. None: heads have one decay
    gate_up    makes the output gates of further numbers of `inputs`; None: `inputs` makes them
    """

    spec: GatedDeltaSpec
    inputs: Linear
    gates: Linear
    weights: DeltaWeights
    output: Linear
    decay_up: Linear | None = None
    gate_up: Linear | None = None

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
        inputs, gates = adapted(adapters, "qkv", x, self.inputs(x)), self.gates(x)
        if self.decay_up is not None and self.gate_up is not None:
            ranks = [self.spec.decay_rank, self.spec.gate_rank]
            inputs, decays, outputs = inputs.split([self.spec.conv_width, *ranks], dim=1)  # type: ignore[no-untyped-call]
            inputs = torch.cat([inputs, self.gate_up(outputs.contiguous())], dim=1)
            gates = torch.cat([gates, self.decay_up(decays.contiguous())], dim=1)
        inputs, gates = inputs.float(), gates.float()
        compute = partial(kernels.gated_delta, self.spec, self.weights, inputs, gates)
        result = compute(states, offset).to(x.dtype)
        states.on_accepted(lambda accepted: compute(accepted, offset))
        return adapted(adapters, "output", result, self.output(result))

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear that need not stay dense."""
        return [(self, name) for name in ("inputs", "output", *self._ups)]

    @property
    def _ups(self) -> list[str]:
        return [] if self.decay_up is None else ["decay_up", "gate_up"]

    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.inputs, self.gates, self.output, self.decay_up, self.gate_up):
            if linear is not None:
                yield from linear.tensors()
        yield from self.weights.tensors()
