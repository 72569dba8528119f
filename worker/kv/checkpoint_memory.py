"""Memory of the checkpoints of recurrent states, for transfers and tiers.

A checkpoint is moved like a block of a cache with one row: a run of bytes with a number. So the
code that moves blocks moves checkpoints too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from worker.kv.transfer.shared_memory import SharedMemory

ITEM_BYTES = 4
"""Bytes of a number of a state, which is a float32."""


@dataclass(frozen=True, slots=True)
class CheckpointMemory:
    """The checkpoints of one worker.

    states   [1 + number of checkpoints, items] float32. Row 0 is NO_CHECKPOINT, which is never
             written
    shared   the memory of `states`, if other workers can map it
    """

    states: Tensor
    shared: SharedMemory | None = None

    @classmethod
    def in_shared_memory(cls, num_checkpoints: int, num_items: int) -> Self:
        """Return new checkpoints, initially zero, that other workers can map. Raises OSError if the
        memory cannot be allocated."""
        shared = SharedMemory((1 + num_checkpoints) * num_items * ITEM_BYTES)
        states = torch.from_numpy(shared.content).view(torch.float32)
        return cls(states.view(1 + num_checkpoints, num_items), shared)

    @property
    def num_rows(self) -> int:
        """Return the number of checkpoints plus one."""
        return self.states.shape[0]

    @property
    def state_bytes(self) -> int:
        return self.states.shape[1] * ITEM_BYTES

    @property
    def rows(self) -> Tensor:
        """Return the checkpoints as bytes, uint8 [1, 1 + number of checkpoints, bytes of a state]:
        the layout of `PagedCache.rows`, with one row."""
        return self.states.view(torch.uint8)[None]
