"""How kernel launches of `TritonSampling` divide the rows of logits, and their common options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from worker.sampling.exact_probs import scale_bits
from worker.sampling.sampler import TokenChoice

NUM_PROGRAMS = 1024
"""Programs of a launch. They fill a GPU. Each of them searches a histogram, so more would only cost
time."""
WARPS = 8
"""Warps of a program."""
EXACT = {"enable_fp_fusion": False}
"""Options of all launches that compute with floats: the compiler may not fuse a product and a sum.
So the results have the same bits on every device."""


@dataclass(frozen=True, slots=True)
class RowSplit:
    """How programs share the rows of logits [rows, vocab]: each reads `blocks` blocks of `block`
    tokens of one row. No result depends on it."""

    rows: int
    vocab: int
    block: int

    @classmethod
    def of(cls, logits: Tensor, block: int) -> Self:
        """Return the split of logits [rows, vocab]."""
        return cls(logits.shape[0], logits.shape[1], block)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of a row."""
        return -(-self.vocab // self.block)

    @property
    def blocks(self) -> int:
        return -(-self.num_blocks // max(1, NUM_PROGRAMS // self.rows))

    @property
    def grid(self) -> tuple[int, int]:
        return self.rows, -(-self.num_blocks // self.blocks)

    @property
    def scale(self) -> float:
        """Return the integer weight of the most likely token, a power of two (exact_probs.py)."""
        return 2.0 ** scale_bits(self.vocab)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """The chosen tokens of a step, and what they were drawn from.

    records   [S, width] int64, see sampling/triton/sampling.py
    """

    records: Tensor
    choice: TokenChoice
