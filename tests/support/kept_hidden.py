"""A proposer that proposes nothing, and remembers the hidden states of each step."""

from __future__ import annotations

from torch import Tensor

from protocol.worker.steps import StepPlan
from worker.batch.batch import BatchRows, Ints
from worker.kv.cache import PagedCache
from worker.slots.table import SlotTable


class KeptHidden:
    """A `TokenProposer` without a model.

    kept   the hidden states of each step, [T, hidden]
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.kept: list[Tensor] = []

    def catch_up(
        self, plan: StepPlan, slots: SlotTable, lens: Ints, rows: BatchRows, hidden: Tensor
    ) -> Tensor | None:
        return None

    def keep(self, slots: SlotTable, rows: BatchRows, hidden: Tensor) -> None:
        assert len(hidden) == rows.counts.sum()
        self.kept.append(hidden.clone())
