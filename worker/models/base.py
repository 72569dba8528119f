"""The interface through which a worker step calls a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.attention.base import Attention, AttentionBatch
from worker.kv.cache import KVCache
from worker.lora.table import StepAdapters


class StepModel(Protocol):
    """Interface of a model that computes steps. It holds no state of any request.

    Legend: T tokens in the step, S rows that need logits, V vocabulary.
    """

    def __call__(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Compute a step: write the K/V of its tokens to `cache`, and return their hidden states.

        token_ids   [T] int64
        adapters    the adapters of the tokens; None: no token has one
        returns     [T, hidden], as `logits` expects them; before the final norm in models of our
                    families, after it in those that transformers computes
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of `hidden` [S, hidden], which are rows of the hidden
        states that a call of the model returned."""
        ...
