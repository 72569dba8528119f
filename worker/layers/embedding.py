"""The interface of embeddings, and their dense implementation with torch.

kernels/packed.py implements the interface with a packed matrix. Legend: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Embedding(Protocol):
    """A table with a row for each of V tokens. The form of its weights depends on the class."""

    @property
    def size(self) -> int:
        """Return the number of rows."""
        ...

    @property
    def num_weights(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the rows."""
        ...

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows [N, hidden] of token_ids [N] int64, in the model's dtype.

        Raises IndexError if a token is not in the vocabulary.
        """
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that hold the weights."""
        ...


@dataclass(slots=True)
class DenseEmbedding:
    """An embedding with dense weights."""

    #: [V, hidden]
    weight: Tensor

    @property
    def size(self) -> int:
        return len(self.weight)

    @property
    def num_weights(self) -> int:
        return self.weight.numel()

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, token_ids)

    def tensors(self) -> Iterator[Tensor]:
        yield self.weight
