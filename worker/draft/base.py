"""The interface of what proposes tokens after a step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from protocol.worker.steps import StepPlan
from worker.batch.batch import BatchRows, Ints
from worker.kv.cache import PagedCache
from worker.slots.table import SlotTable


class TokenProposer(Protocol):
    """A draft model (model.py), or the model's own head (head.py).

    cache   its keys and values, in the same blocks as the model's
    """

    cache: PagedCache

    def catch_up(
        self, plan: StepPlan, slots: SlotTable, lens: Ints, rows: BatchRows, hidden: Tensor
    ) -> Tensor | None:
        """Do what a plan requests after its step has sampled. Return the proposed tokens of all
        rows in row order, [sum of plan.wanted] int64, or None if the plan requests no proposals.

        lens     [R] known tokens of each row after the step has sampled
        hidden   [T, hidden] the model's hidden states of the step's tokens

        This only queues work, and does not wait for the device. Raises ValueError if the plan's
        columns contradict each other.
        """
        ...

    def keep(self, slots: SlotTable, rows: BatchRows, hidden: Tensor) -> None:
        """Keep what later steps need of the hidden states [T, hidden] of a step, after it has
        sampled and after `catch_up`."""
        ...
