"""A linear layer with packed weights and, if that is faster, a dense copy for steps of many rows.

Measurements decide whether there is a copy and which steps use it (models/autotune_cache.py). Until
then, the layer keeps a function that reads its matrix from the files again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from torch import Tensor

from worker.kernels.packed import PackedLinear
from worker.layers.linear import Linear

NEVER = sys.maxsize
"""A number of rows that no step has."""


class HybridLinear:
    """A `Linear` (linear.py) that uses packed or dense weights, depending on the number of rows."""

    def __init__(self, packed: PackedLinear, read_dense: Callable[[], Linear]) -> None:
        self.packed = packed
        self.dense: Linear | None = None
        #: Steps with at least this many rows use `dense`.
        self.min_dense_rows = NEVER
        #: Reads the same matrix from the files again. None after `finalize`.
        self.read_dense: Callable[[], Linear] | None = read_dense

    @property
    def num_weights(self) -> int:
        return self.packed.num_weights

    @property
    def dense_bytes(self) -> int:
        """Return the bytes that a dense copy takes in bfloat16."""
        return 2 * self.num_weights

    def finalize(self, min_dense_rows: int) -> Linear:
        """Return the layer to use from now on, and release the function that reads the files.

        min_dense_rows   steps with at least this many rows will use a dense copy, which is read
                         now; NEVER makes no copy
        """
        assert self.read_dense is not None, "the layer is already finalized"
        if min_dense_rows < NEVER:
            self.dense = self.read_dense()
        self.min_dense_rows, self.read_dense = min_dense_rows, None
        return self.packed if self.dense is None else self

    def __call__(self, x: Tensor) -> Tensor:
        if self.dense is not None and len(x) >= self.min_dense_rows:
            return self.dense(x)
        return self.packed(x)

    def to_float(self, x: Tensor) -> Tensor:
        """Return the output [N, out] for x [N, in] in float32, from the packed weights. Only the
        output head calls this, and it has no dense copy."""
        return self.packed.to_float(x)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the packed weights, without the dense copy."""
        return self.packed.tensors()
