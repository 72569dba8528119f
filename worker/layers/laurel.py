"""A linear branch of low rank beside the attention: Laurel, as Gemma 3n has it.

Legend: T tokens of the step, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.layers.linear import Linear
from worker.layers.norm import Norm

SCALE: float = 2.0**-0.5
"""Factor of the sum of the attention and the branch."""


@dataclass(slots=True)
class Laurel:
    """The branch of one layer.

    inputs    [T, hidden] to [T, R]
    outputs   [T, R] to [T, hidden]
    norm      of the result
    """

    inputs: Linear
    outputs: Linear
    norm: Norm

    def add(self, x: Tensor, normed: Tensor) -> None:
        """Add the result of the branch to x in place, and scale the sum.

        x        [T, hidden] the hidden states after the attention
        normed   [T, hidden] what the attention and the branch read
        """
        result = self.norm(self.outputs(self.inputs(normed)))
        x.add_(result.add_(normed)).mul_(SCALE)

    @property
    def linears(self) -> list[tuple[Any, str]]:
        """Return (owner, name of the attribute) for each linear."""
        return [(self, "inputs"), (self, "outputs")]

    def tensors(self) -> Iterator[Tensor]:
        for part in (self.inputs, self.outputs, self.norm):
            yield from part.tensors()
