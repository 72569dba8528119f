"""Interface of a model to the runner."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.attention.base import Attention, AttentionBatch
from worker.kv.cache import KVCache


class StepModel(Protocol):
    """A model, without state of any request. T tokens in the step, S rows, V vocabulary."""

    def __call__(
        self, token_ids: Tensor, batch: AttentionBatch, cache: KVCache, attention: Attention
    ) -> Tensor:
        """Return hidden [T, hidden] of token_ids [T] int64, and write their K/V into the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of hidden [S, hidden]."""
        ...
