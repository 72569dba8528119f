"""Interface of a model to the runner."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.attention.base import Attention, AttentionBatch
from worker.kv.cache import KVCache


class StepModel(Protocol):
    """Weights; no state of any request. T tokens in the step, S rows, V vocabulary."""

    def __call__(
        self, token_ids: Tensor, batch: AttentionBatch, cache: KVCache, attention: Attention
    ) -> Tensor:
        """token_ids [T] int64 -> hidden [T, hidden]; writes the tokens' K/V into the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden] -> [S, V] float32."""
        ...
