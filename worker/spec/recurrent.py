"""Token mixers with a recurrent state: what a layer keeps of all earlier tokens has a fixed size.

The state of a request is in its slot (slots/table.py), as float32 numbers: for each layer with such
a mixer, in the order of the layers, first the tail of its convolution and then its matrices.
`GatedDeltaSpec` says how long both are. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.errors import UnusableModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A gated delta net: a short convolution, then a linear attention whose state S [key_dim,
    value_dim] of each value head is decayed and corrected by each token:

        S = exp(g) * S;  S = S + beta * k (v - S^T k)^T;  output = S^T q

    `num_value_heads` heads share `num_key_heads` queries and keys. The state, with the input of the
    convolution for the last `kernel - 1` tokens, is all that a layer keeps of earlier tokens.
    Source: arXiv 2412.06464.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    #: Number of tokens that the convolution sees, the current one included.
    kernel: int
    #: Added to the mean square in the norm of each head's output.
    eps: float
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
    def output_width(self) -> int:
        """Return the width of the result, before the last projection."""
        return self.value_width

    @property
    def input_width(self) -> int:
        """Return the width of the first projection: the convolution's input, and the gates."""
        return self.conv_width + self.value_width

    @property
    def conv_width(self) -> int:
        """Return the width of the convolution's input: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def tail_items(self) -> int:
        """Return the size of the convolution's tail: [kernel - 1, conv_width], oldest token
        first."""
        return (self.kernel - 1) * self.conv_width

    @property
    def state_items(self) -> int:
        """Return how many numbers the layer keeps of earlier tokens: the tail, and then a matrix
        [key_dim, value_dim] for each value head."""
        return self.tail_items + self.num_value_heads * self.key_dim * self.value_dim

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the dimensions, all of which must be above zero."""
        heads = self.num_key_heads, self.num_value_heads
        return (*heads, self.key_dim, self.value_dim, self.kernel)

    def check(self) -> None:
        """Raise UnusableModel if the dimensions contradict each other."""
        if min(self.sizes) < 1:
            raise UnusableModel(f"a dimension of linear attention is not above zero: {self.sizes}")
        if self.kernel < 2:
            raise UnusableModel(f"a convolution of {self.kernel} tokens is not supported")
        if self.num_value_heads % self.num_key_heads:
            raise UnusableModel(
                f"{self.num_value_heads} value heads cannot share {self.num_key_heads} key heads "
                "evenly"
            )
