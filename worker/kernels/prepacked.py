"""Dense matrices in oneDNN's blocked layout, converted once instead of in every call.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

TYPICAL_ROWS = 64
"""oneDNN chooses a layout for this number of rows, and uses it for all others too."""


class Prepacked:
    """A layers.linear.Linear of weight [out, in] bfloat16 and bias [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_weights = weight.numel() + (0 if bias is None else bias.numel())
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def to_float(self, x: Tensor) -> Tensor:
        return self(x).float()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the bias only: the matrix has no address."""
        if self._bias is not None:
            yield self._bias


def is_possible() -> bool:
    """Whether torch was built with oneDNN, and has the functions used here."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return bool(torch._C._has_mkldnn) and all(hasattr(torch.ops.mkldnn, name) for name in names)
