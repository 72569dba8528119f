"""Dense matrices in oneDNN's blocked layout, into which they are converted once, not in every call.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TYPICAL_ROWS = 64
"""Number of rows for which oneDNN chooses the layout. Other numbers of rows use the same layout."""


class Prepacked:
    """A `Linear` (layers/linear.py) with a matrix in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Convert weight [out, in] bfloat16; bias [out]."""
        self.num_weights = weight.numel() + (0 if bias is None else bias.numel())
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def to_float(self, x: Tensor) -> Tensor:
        return self(x).float()

    def tensors(self) -> Iterator[Tensor]:
        """Yield only the bias, because torch cannot read the converted matrix."""
        if self._bias is not None:
            yield self._bias


def is_possible() -> bool:
    """Return whether this build of torch and this processor can use `Prepacked` matrices.

    oneDNN converts bfloat16 matrices only on processors with AVX-512 or avx_ne_convert.
    """
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch._C._has_mkldnn or not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
