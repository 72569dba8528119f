"""A linear layer that is held twice where that pays: packed for few rows, dense for many.

Which form is faster from how many rows on is measured (worker/models/autotune_cache.py). Until that
is settled a layer is packed, and knows how to read its matrix once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from torch import Tensor

from worker.kernels.packed import PackedLinear
from worker.layers.linear import Linear

NEVER = sys.maxsize


class HybridLinear:
    """A layers.linear.Linear.

    from_rows   steps of so many rows and more compute with `dense`, which is there then
    """

    def __init__(self, packed: PackedLinear, read: Callable[[], Linear]) -> None:
        """read: the same matrix once more, from the files."""
        self.packed = packed
        self.dense: Linear | None = None
        self.from_rows = NEVER
        self.read_dense: Callable[[], Linear] | None = read

    @property
    def num_weights(self) -> int:
        return self.packed.num_weights

    @property
    def dense_bytes(self) -> int:
        """What a dense copy takes, in numbers of two bytes."""
        return 2 * self.num_weights

    def settle(self, from_rows: int) -> Linear:
        """What serves from now on; NEVER: packed alone. The files are not needed any more."""
        assert self.read_dense is not None, "it is settled"
        if from_rows < NEVER:
            self.dense = self.read_dense()
        self.from_rows, self.read_dense = from_rows, None
        return self.packed if self.dense is None else self

    def __call__(self, x: Tensor) -> Tensor:
        if self.dense is not None and len(x) >= self.from_rows:
            return self.dense(x)
        return self.packed(x)

    def to_float(self, x: Tensor) -> Tensor:
        """Of a head, whose rows are those that are sampled: always packed."""
        return self.packed.to_float(x)

    def tensors(self) -> Iterator[Tensor]:
        """What a step of few rows reads; a dense copy is beside it."""
        return self.packed.tensors()
