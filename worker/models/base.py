"""The interface through which a worker step calls a model."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from worker.attention.base import Attention, AttentionBatch
from worker.batch.batch import BatchRows
from worker.kv.cache import PagedCache
from worker.lora.table import StepAdapters
from worker.slots.states import StepStates


@runtime_checkable
class RowModel(Protocol):
    """Interface of a model that computes one row after another, with a state object for each
    request. The model holds no state of any request: the slots do."""

    def compute_rows(
        self, token_ids: Tensor, rows: BatchRows, states: MutableMapping[int, object]
    ) -> Tensor:
        """Compute a step: return the hidden states [T, hidden] of token_ids [T] int64, and put the
        new state of each row's slot into `states`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of `hidden` [S, hidden]."""
        ...


class StepModel(Protocol):
    """Interface of a model that computes steps. It holds no state of any request.

    Legend: T tokens in the step, S rows that need logits, V vocabulary.
    """

    def __call__(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: PagedCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Compute a step: write the K/V of its tokens to `cache`, and return their hidden states.

        token_ids   [T] int64
        adapters    the adapters of the tokens; None: no token has one
        states      the recurrent states of the rows; None: the model has none
        returns     [T, hidden], as `logits` expects them; before the final norm in models of our
                    families, after it in those that transformers computes
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of `hidden` [S, hidden], which are rows of the hidden
        states that a call of the model returned."""
        ...
