"""The recurrent states that the rows of a step continue.

A layer with a recurrent state reads and writes a part of each row's numbers, which begins at the
same place in all rows. Tokens change the state one after another. The state after a token that an
engine wants to keep is copied to a checkpoint on the way. Drafts do not change the state in the
slot: the layers compute them with a copy, and compute those that were right once more, when the
step has sampled (`accept`). The second time takes little, because the inputs are there.

Legend: R rows, C saved states. All arrays are int64, on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(slots=True)
class StepStates:
    """The states of a step's rows.

    memory        [slots, items] float32: the states of all slots
    checkpoints   [1 + number of checkpoints, items] float32
    slots         [R] the slot of each row
    starts        [R] position of the row's first token in its request
    firsts        [R] index of the row's first token among those of the step
    counts        [R] number of the row's tokens
    kept          [R] how many of them change the state in the slot: all but the drafts
    save_rows     [C] ascending: the row whose state is saved
    save_counts   [C] after how many of the row's tokens it is saved; ascending in each row
    save_ids      [C] the checkpoint that it is copied to
    """

    memory: Tensor
    checkpoints: Tensor
    slots: Ints
    starts: Ints
    firsts: Ints
    counts: Ints
    kept: Ints
    save_rows: Ints
    save_counts: Ints
    save_ids: Ints
    #: What the layers do once more with the drafts that were right.
    again: list[Callable[[StepStates], object]] = field(default_factory=list)

    @property
    def first_tokens(self) -> Ints:
        """Return the indexes, among the tokens of the step, of those at position 0."""
        found: Ints = self.firsts[(self.starts == 0) & (self.counts > 0)]
        return found

    @property
    def has_drafts(self) -> bool:
        return bool((self.kept < self.counts).any())

    def on_accepted(self, compute: Callable[[StepStates], object]) -> None:
        """Call `compute` in `accept`, if the step has drafts."""
        if self.has_drafts:
            self.again.append(compute)

    def saves(self, row: int) -> list[tuple[int, int]]:
        """Return (number of tokens, checkpoint) of each state that is saved in a row."""
        first, end = np.searchsorted(self.save_rows, (row, row + 1))
        counts, ids = self.save_counts[first:end], self.save_ids[first:end]
        return [*zip(counts.tolist(), ids.tolist(), strict=True)]

    def accept(self, accepted: Ints) -> None:
        """Change the states by the drafts that were right, and save those that follow them.

        accepted   [R] number of drafts of each row that were right
        """
        rows = np.flatnonzero(accepted > 0)
        num_kept = self.kept[self.save_rows]
        is_later = (self.save_counts > num_kept) & (
            self.save_counts <= num_kept + accepted[self.save_rows]
        )
        at = np.flatnonzero(is_later)
        states = StepStates(
            self.memory,
            self.checkpoints,
            self.slots[rows],
            self.starts[rows] + self.kept[rows],
            self.firsts[rows] + self.kept[rows],
            accepted[rows],
            accepted[rows],
            np.searchsorted(rows, self.save_rows[at]),
            (self.save_counts - num_kept)[at],
            self.save_ids[at],
        )
        if len(rows):
            for compute in self.again:
                compute(states)
        self.again.clear()
