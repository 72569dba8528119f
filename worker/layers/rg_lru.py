"""An RG-LRU layer, the token mixer of most layers of RecurrentGemma.

The convolution and the recurrence are two operations on the states, and the linears of the gates
between them compute all tokens of a step together. With drafts, each operation is computed once
more with those that were right. The linears are not, because their results do not depend on the
states.

Legend in rg_lru_rule.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from worker.kernels.base import Kernels
from worker.layers.linear import HeadLinears, Linear
from worker.layers.low_rank import LayerAdapters, adapted
from worker.layers.rg_lru_rule import LruInputs, LruWeights
from worker.slots.states import StepStates
from worker.spec.recurrent import RgLruSpec


@dataclass(slots=True)
class RgLru:
    """The weights of an RG-LRU layer.

    inputs   makes x before the convolution, and the gate of the results: [T, 2 C]
    gates    make of a head's x the gates of the inputs and of the decays: [H, T, 2 D]. Their biases
             are two of `weights`
    """

    spec: RgLruSpec
    inputs: Linear
    gates: HeadLinears
    weights: LruWeights
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
        spec, dtype = self.spec, x.dtype
        inputs = adapted(adapters, "qkv", x, self.inputs(x)).float()
        before, gate = inputs.chunk(2, dim=1)
        convolve = partial(kernels.rg_lru_conv, spec, self.weights, before)
        mixed = convolve(states, offset)
        states.on_accepted(lambda accepted: convolve(accepted, offset))
        heads = mixed.to(dtype).view(len(x), spec.num_heads, spec.head_dim)
        gates = self.gates(heads.transpose(0, 1).contiguous()).float()
        scan = partial(kernels.rg_lru_scan, spec, self.weights, LruInputs(mixed, gates, gate))
        result = scan(states, offset).to(dtype)
        states.on_accepted(lambda accepted: scan(accepted, offset))
        return adapted(adapters, "output", result, self.output(result))

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear but those of heads."""
        return [(self, "inputs"), (self, "output")]

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.inputs, self.gates, self.weights, self.output):
            yield from part.tensors()
