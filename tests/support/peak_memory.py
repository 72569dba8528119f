"""The most memory that tensors of torch take at a time, counted exactly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from protocol.worker.steps import StepPlan
from worker.batch.batch import BatchRows, Ints
from worker.draft.base import TokenProposer
from worker.slots.table import SlotTable


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside `with` make, until they are freed.

    peak   the most bytes at a time
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._current = 0
        self._live: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        for tensor in tree_leaves(found):
            if _is_tensor(tensor) and _storage(tensor) not in given | self._live:
                self._add(tensor)
        return found

    def _add(self, tensor: torch.Tensor) -> None:
        key, size = _storage(tensor), tensor.untyped_storage().nbytes()
        self._live.add(key)
        self._current += size
        self.peak = max(self.peak, self._current)
        weakref.finalize(tensor.untyped_storage(), self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._live.discard(key)
        self._current -= size


class MeasuredProposer:
    """A `TokenProposer` that measures the memory of another one's work.

    peak   the most bytes that it took at a time
    """

    def __init__(self, proposer: TokenProposer) -> None:
        self._proposer = proposer
        self.cache = proposer.cache
        self.peak = 0

    def catch_up(
        self, plan: StepPlan, slots: SlotTable, lens: Ints, rows: BatchRows, hidden: Tensor
    ) -> Tensor | None:
        with PeakMemory() as memory:
            proposed = self._proposer.catch_up(plan, slots, lens, rows, hidden)
        self.peak = max(self.peak, memory.peak)
        return proposed

    def keep(self, slots: SlotTable, rows: BatchRows, hidden: Tensor) -> None:
        self._proposer.keep(slots, rows, hidden)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
