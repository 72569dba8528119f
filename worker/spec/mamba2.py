"""Mamba-2: a token mixer with a recurrent state. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from worker.errors import UnusableModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """A Mamba-2 layer: a short convolution, then a recurrence whose state S [head_dim, state] of
    each head is decayed and extended by each token:

        S = exp(dt * A) * S + dt * x B^T;  output = S C + D * x

    Each of `num_groups` pairs of B and C serves consecutive heads. The result is multiplied by the
    SiLU of a gate, and then normed over each group. Source: arXiv 2405.21060.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    #: Size of B and C.
    state: int
    #: Number of tokens that the convolution sees, the current one included.
    kernel: int
    #: Added to the mean square in the norm of the result.
    eps: float
    conv_bias: bool = True
    #: Whether the projections of the input and of the result have biases.
    bias: bool = False
    #: Smallest and largest dt.
    limits: tuple[float, float] = (0.0, inf)

    @property
    def output_width(self) -> int:
        """Return the width of the result, before the last projection."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Return the width of the convolution's input: x, B and C."""
        return self.output_width + 2 * self.num_groups * self.state

    @property
    def input_width(self) -> int:
        """Return the width of the first projection: the gate, the convolution's input, and dt."""
        return self.output_width + self.conv_width + self.num_heads

    @property
    def tail_items(self) -> int:
        """Return the size of the convolution's tail: [kernel - 1, conv_width], oldest token
        first."""
        return (self.kernel - 1) * self.conv_width

    @property
    def state_items(self) -> int:
        """Return how many numbers the layer keeps of earlier tokens: the tail, and then a matrix
        [head_dim, state] for each head."""
        return self.tail_items + self.num_heads * self.head_dim * self.state

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the dimensions, all of which must be above zero."""
        return self.num_heads, self.head_dim, self.num_groups, self.state, self.kernel

    def check(self) -> None:
        """Raise UnusableModel if the dimensions contradict each other."""
        if min(self.sizes) < 1:
            raise UnusableModel(f"a dimension of a Mamba layer is not above zero: {self.sizes}")
        if self.kernel < 2:
            raise UnusableModel(f"a convolution of {self.kernel} tokens is not supported")
        if self.num_heads % self.num_groups:
            raise UnusableModel(
                f"{self.num_heads} heads of a Mamba layer cannot share {self.num_groups} groups "
                "evenly"
            )
        if not self.limits[0] <= self.limits[1]:
            raise UnusableModel(f"time_step_limit is {self.limits}; the first is above the second")
