"""Token mixers with a recurrent state: what a layer keeps of all earlier tokens has a fixed size.

The state of a request is in its slot (slots/table.py), as float32 numbers: for each layer with such
a mixer, in the order of the layers, first the tail of its convolution and then its matrices, if it
has any. Needs no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

from worker.errors import UnusableModel

if TYPE_CHECKING:
    from worker.spec.model_spec import Activation

NormPlace = Literal["after gate", "before gate"] | None
MadeNorms = Literal["with weights", "without weights"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedSpec(ABC):
    """The causal convolution that every recurrent mixer has. It runs over the last `kernel`
    tokens, for each channel on its own. Its tail is the inputs of the last `kernel - 1` tokens."""

    #: Number of tokens that the convolution sees, the current one included.
    kernel: int

    @property
    @abstractmethod
    def conv_width(self) -> int:
        """Return the width of the convolution's input."""

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Return the width of what the output projection reads."""

    @property
    @abstractmethod
    def work_width(self) -> int:
        """Return how many numbers a step computes for one token, at most."""

    @property
    def tail_items(self) -> int:
        """Return the size of the convolution's tail: [kernel - 1, conv_width], oldest token
        first."""
        return (self.kernel - 1) * self.conv_width

    @property
    def state_items(self) -> int:
        """Return how many numbers the layer keeps of earlier tokens. The tail is the first of
        them."""
        return self.tail_items

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Return the dimensions, all of which must be above zero."""

    def check(self) -> None:
        """Raise UnusableModel if the dimensions contradict each other."""
        if min(self.sizes) < 1:
            raise UnusableModel(f"a dimension of a recurrent layer is not above zero: {self.sizes}")
        if self.kernel < 2:
            raise UnusableModel(f"a convolution of {self.kernel} tokens is not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(ConvolvedSpec):
    """A gated delta net: a short convolution, then a linear attention whose state S [key_dim,
    value_dim] of each value head is decayed and corrected by each token:

        S = exp(g) * S;  S = S + beta * k (v - S^T k)^T;  output = S^T q

    beta is a sigmoid times `beta_scale`. `num_value_heads` heads share `num_key_heads` queries and
    keys. Source: arXiv 2412.06464.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    #: Added to the mean square in the norm of each head's output.
    eps: float
    #: With 2, a token can turn what S returns for its key into the opposite: S changes by matrices
    #: with negative eigenvalues (arXiv 2411.12537).
    beta_scale: float = 1.0
    #: Rank of the two linears that make a decay of each row of S. 0: each head has one decay, which
    #: one linear makes.
    decay_rank: int = 0
    #: Rank of the two linears that make the gates of the results. 0: one linear makes them.
    gate_rank: int = 0
    #: The activation of these gates.
    gate: Literal["silu", "sigmoid"] = "silu"
    #: Whether value head v uses the queries and keys of head v % num_key_heads, and not of head
    #: v // (num_value_heads / num_key_heads). The converter of llama.cpp orders value heads so.
    tiled: bool = False

    @property
    def key_width(self) -> int:
        """Return the width of all queries, or of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Return the width of the convolution's input: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def output_width(self) -> int:
        return self.value_width

    @property
    def decays(self) -> int:
        """Return the number of decays of a head."""
        return self.key_dim if self.decay_rank else 1

    @property
    def work_width(self) -> int:
        decays = 3 * self.num_value_heads * self.decays
        return 3 * self.conv_width + 4 * self.value_width + decays

    @property
    def state_items(self) -> int:
        """Return how many numbers the layer keeps of earlier tokens: the tail, and then a matrix
        [key_dim, value_dim] for each value head."""
        return self.tail_items + self.num_value_heads * self.key_dim * self.value_dim

    @property
    def sizes(self) -> tuple[int, ...]:
        heads = self.num_key_heads, self.num_value_heads
        return (*heads, self.key_dim, self.value_dim, self.kernel)

    def check(self) -> None:
        ConvolvedSpec.check(self)  # a class with slots has no super() without arguments
        if self.num_value_heads % self.num_key_heads:
            raise UnusableModel(
                f"{self.num_value_heads} value heads cannot share {self.num_key_heads} key heads "
                "evenly"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(ConvolvedSpec):
    """A short convolution between two gates B and C, which each token makes with its input x, all
    of them [width]:

        output = C * convolution(B * x)
    """

    width: int
    #: Whether the convolution and both projections have biases.
    bias: bool = False

    @property
    def conv_width(self) -> int:
        return self.width

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def work_width(self) -> int:
        return 8 * self.width

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.width, self.kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(ConvolvedSpec):
    """Mamba-2: a short convolution, then a recurrence whose state S [head_dim, state] of each head
    is decayed and extended by each token:

        S = exp(dt * A) * S + dt * x B^T;  output = S C + D * x

    Each of `num_groups` pairs of B and C serves consecutive heads. The result is multiplied by the
    SiLU of a gate, and then normed over each group (`norm`). Source: arXiv 2405.21060.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    #: Size of B and C.
    state: int
    #: Added to the mean square in the norm of the result.
    eps: float
    conv_bias: bool = True
    #: Whether the projections of the input and of the result have biases.
    bias: bool = False
    #: Smallest and largest dt.
    limits: tuple[float, float] = (0.0, inf)
    #: Whether the result is normed: after it is multiplied by the gate, or before. None: it is not.
    norm: NormPlace = "after gate"
    #: Factors of the projected gate, x, B, C and dt. None: there are none.
    input_scales: tuple[float, float, float, float, float] | None = None
    #: Factor of the result.
    result_scale: float = 1.0

    @property
    def output_width(self) -> int:
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
    def input_widths(self) -> tuple[int, int, int, int, int]:
        """Return the widths of the gate, x, B, C and dt."""
        width, groups = self.output_width, self.num_groups * self.state
        return width, width, groups, groups, self.num_heads

    @property
    def work_width(self) -> int:
        return 3 * self.input_width + 2 * self.output_width

    @property
    def state_items(self) -> int:
        """Return how many numbers the layer keeps of earlier tokens: the tail, and then a matrix
        [head_dim, state] for each head."""
        return self.tail_items + self.num_heads * self.head_dim * self.state

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.num_groups, self.state, self.kernel

    def check(self) -> None:
        ConvolvedSpec.check(self)
        if self.num_heads % self.num_groups:
            raise UnusableModel(
                f"{self.num_heads} heads of a Mamba layer cannot share {self.num_groups} groups "
                "evenly"
            )
        if not self.limits[0] <= self.limits[1]:
            raise UnusableModel(f"time_step_limit is {self.limits}; the first is above the second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Spec(ConvolvedSpec):
    """Mamba-1: a short convolution makes x, linears make dt, B and C of it, and a recurrence
    follows, whose state S [channels, state] is decayed and extended by each token:

        S = exp(dt * A) * S + dt * x B^T;  output = S C + D * x

    dt is [channels], and A is [channels, state]. The linear that makes dt is the product of two
    matrices of rank `rank`. The result is multiplied by the SiLU of a gate. B, C and the inputs of
    dt's second matrix may be normed (`norms`). Source: arXiv 2312.00752, arXiv 2403.19887.
    """

    channels: int
    #: Size of B and C.
    state: int
    rank: int
    #: Added to the mean square in the three norms.
    eps: float
    conv_bias: bool = True
    #: Whether the projections of the input and of the result have biases.
    bias: bool = False
    #: Norms of the inputs of dt's second matrix, of B and of C. None: there are none.
    norms: MadeNorms = "with weights"

    @property
    def output_width(self) -> int:
        return self.channels

    @property
    def conv_width(self) -> int:
        return self.channels

    @property
    def made_widths(self) -> list[int]:
        """Return the widths of what is made of x: the input of dt's second matrix, B and C."""
        return [self.rank, self.state, self.state]

    @property
    def work_width(self) -> int:
        return 12 * self.channels + 4 * sum(self.made_widths)

    @property
    def matrix_items(self) -> int:
        """Return the size of the recurrence's matrix [channels, state]."""
        return self.channels * self.state

    @property
    def state_items(self) -> int:
        """Return how many numbers the layer keeps of earlier tokens: the tail, and then the
        matrix."""
        return self.tail_items + self.matrix_items

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.channels, self.state, self.rank, self.kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruSpec(ConvolvedSpec):
    """A real-gated linear recurrent unit: a short convolution makes x, and a recurrence follows,
    whose state s [width] is decayed and extended by each token:

        a = exp(decay * sigmoid(r));  s = a * s + sqrt(1 - a^2) * sigmoid(i) * x

    A linear of each head makes i and r of the head's part of x. The first token of a text has
    a = 0. The result is multiplied by the activation of a gate. Source: arXiv 2402.19427.
    """

    num_heads: int
    head_dim: int
    #: That of the gate.
    activation: Activation

    @property
    def width(self) -> int:
        """Return the number of channels."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.width

    @property
    def output_width(self) -> int:
        return self.width

    @property
    def work_width(self) -> int:
        return 20 * self.width

    @property
    def state_items(self) -> int:
        """Return how many numbers the layer keeps of earlier tokens: the tail, and then the numbers
        of the recurrence."""
        return self.tail_items + self.width

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.num_heads, self.head_dim, self.kernel


RecurrentSpec = GatedDeltaSpec | Mamba1Spec | Mamba2Spec | RgLruSpec | ShortConvSpec
