"""A gated delta net: the token mixer of some layers of Qwen3-Next, Qwen3.5 and OLMo Hybrid.

Legend in delta_rule.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

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

    inputs   makes the queries, keys, values, and the output gates: [T, C + H * V]
    gates    makes what beta and the decay of each value head are made of: [T, 2 H]
    """

    spec: GatedDeltaSpec
    inputs: Linear
    gates: Linear
    weights: DeltaWeights
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
        gates = self.gates(x).float()
        compute = partial(kernels.gated_delta, self.spec, self.weights, inputs, gates)
        result = compute(states, offset).to(x.dtype)
        states.on_accepted(lambda accepted: compute(accepted, offset))
        return adapted(adapters, "output", result, self.output(result))

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear that need not stay dense."""
        return [(self, "inputs"), (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.inputs, self.gates, self.output):
            yield from linear.tensors()
        yield from self.weights.tensors()
