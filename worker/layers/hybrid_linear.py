"""A linear layer in one or two forms: packed for few rows, and also dense for many if that pays.

The number of rows from which dense is faster is measured (worker/models/autotune_cache.py). Until
then the layer is packed, and can read its matrix again from the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from torch import Tensor

from worker.kernels.packed import PackedLinear
from worker.layers.linear import Linear

NEVER = sys.maxsize


class HybridLinear:
    """A worker.layers.linear.Linear.

    min_dense_rows   steps with at least this many rows use `dense`
    """

    def __init__(self, packed: PackedLinear, read: Callable[[], Linear]) -> None:
        """`read` reads the same matrix again from the files."""
        self.packed = packed
        self.dense: Linear | None = None
        self.min_dense_rows = NEVER
        self.read_dense: Callable[[], Linear] | None = read

    @property
    def num_weights(self) -> int:
        return self.packed.num_weights

    @property
    def dense_bytes(self) -> int:
        """Memory of a dense copy with numbers of two bytes."""
        return 2 * self.num_weights

    def finalize(self, min_dense_rows: int) -> Linear:
        """Return the layer to use from now on. NEVER keeps only the packed form. The files are not
        read afterwards."""
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
        """Compute a head in float32. It has only the sampled rows, so it is always packed."""
        return self.packed.to_float(x)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the memory that a step of few rows reads, without the dense copy."""
        return self.packed.tensors()
