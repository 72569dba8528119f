"""Norms over the last axis: root mean square, or layer norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from worker.spec.model_spec import NormSpec


@dataclass(slots=True)
class Norm:
    """A norm with its weight [size]; only layer norms have a bias [size].

    The weight includes the offset of `spec`. With an offset the weight of an RMS norm is float32,
    because the sum 1 + w would lose most digits of a small w in bfloat16. For layer norms, the
    models' own code computes this sum in the dtype of the weight.
    """

    spec: NormSpec
    weight: Tensor
    bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether this is an RMS norm whose weight has no offset."""
        return self.spec.kind == "rms" and not self.spec.offset

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., size], in x's dtype."""
        size, eps = self.weight.shape, self.spec.eps
        if self.spec.kind == "layer":
            return layer_norm(x, size, self.weight, self.bias, eps)
        if self.weight.dtype == x.dtype:
            return rms_norm(x, size, self.weight, eps)
        return rms_norm(x.float(), size, self.weight, eps).to(x.dtype)

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight
        if self.bias is not None:
            yield self.bias
