"""A smaller model beside the model: it guesses how answers go on, for later steps to verify.

It has a KV cache of its own, whose blocks are those of the model's: the same ids, the same tables,
zeroed together. So whoever has a block of one has that of the other. Of a request it keeps nothing
else: from where on it has to compute is the plan's to say, and what it computed for tokens that it
only guessed is computed again when they are known. What it guesses is what it thinks most likely
(worker/sampling/verify.py says why that loses nothing).

Legend: R rows of the step, Q rows that it follows in this step, P of these those that want guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protocol.steps import StepPlan
from worker.attention.base import Attention
from worker.batch.batch import Ints, Spans, place
from worker.kv.cache import KVCache
from worker.models.base import StepModel
from worker.slots.staging import integers, upload
from worker.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class CatchUp:
    """What the plan asks of the draft model: [Q] int64 each, rows of one position first.

    starts, ends   the positions to be computed, all of whose tokens are known
    wanted         how many tokens to guess behind them;   offsets   where they stand in the result
    """

    slots: Ints
    starts: Ints
    ends: Ints
    wanted: Ints
    offsets: Ints


def read_catch_up(plan: StepPlan, lens: Ints) -> CatchUp | None:
    """lens [R]: the tokens of each row that are known once the step has sampled. Raises ValueError
    where the plan's columns contradict each other."""
    if plan.follow_starts is None or plan.follow_tokens is None or plan.wanted is None:
        return None
    columns = (plan.row_slots, plan.follow_starts, plan.follow_tokens, plan.wanted)
    slots, starts, tokens, wanted = (integers(array.data) for array in columns)
    samples = np.frombuffer(plan.row_samples.data, np.uint8)
    if not len(slots) == len(starts) == len(tokens) == len(wanted):
        raise ValueError(f"step {plan.step}: columns of the draft model do not fit its rows")
    if (wanted < 0).any() or (wanted[(starts < 0) | (samples == 0)] > 0).any():
        raise ValueError(f"step {plan.step}: guesses are for rows that sample and are followed")
    ends = np.where(wanted > 0, lens, starts + tokens)
    rows = np.flatnonzero(starts >= 0)
    if not len(rows) or (starts >= ends)[rows].any() or (ends > lens)[rows].any():
        raise ValueError(f"step {plan.step}: the draft model cannot compute what is not known")
    rows = rows[np.argsort(ends[rows] - starts[rows] != 1, kind="stable")]
    offsets = wanted.cumsum() - wanted
    return CatchUp(slots[rows], starts[rows], ends[rows], wanted[rows], offsets[rows])


class DraftModel:
    """Weights and a cache. Vocabulary ids are the model's own, `vocab` in number."""

    def __init__(self, model: StepModel, cache: KVCache, attention: Attention, vocab: int) -> None:
        self._model = model
        self.cache = cache
        self._attention = attention
        self._vocab = vocab

    def follow(self, plan: StepPlan, slots: SlotTable, lens: Ints) -> Tensor | None:
        """Compute what the plan says; the tokens that were wanted, [sum of wanted] int64, or None.

        Queues only: nothing waits for the device.
        """
        work = read_catch_up(plan, lens)
        if work is None:
            return None
        counts = work.ends - work.starts
        asked = np.flatnonzero(work.wanted)
        spans = Spans(work.slots, work.starts, counts, int((counts == 1).sum()))
        last = counts.cumsum()[asked] - 1
        placed, (at,) = place(spans, slots, self.cache.block_tokens, last)
        hidden = self._model(placed.token_ids(slots), placed.attention, self.cache, self._attention)
        if not len(asked):
            return None
        return self._guess(work, asked, self._likeliest(hidden.index_select(0, at)), slots)

    def _guess(self, work: CatchUp, asked: Ints, tokens: Tensor, slots: SlotTable) -> Tensor:
        """tokens [P]: the first guess of each row that wants some."""
        proposed = torch.empty(int(work.wanted.sum()), dtype=torch.int64, device=slots.device)
        for nth in range(int(work.wanted.max())):
            if nth:
                kept = np.flatnonzero(work.wanted[asked] > nth)
                asked = asked[kept]
                (of,) = upload([kept], slots.device)
                tokens = self._next(work, asked, nth, tokens.index_select(0, of), slots)
            (at,) = upload([work.offsets[asked] + nth], slots.device)
            proposed.index_copy_(0, at, tokens)
        return proposed

    def _next(
        self, work: CatchUp, rows: Ints, nth: int, tokens: Tensor, slots: SlotTable
    ) -> Tensor:
        """One more guess for these rows, behind `tokens`, the last ones."""
        starts = work.ends[rows] + nth - 1
        spans = Spans(work.slots[rows], starts, np.ones_like(starts), len(rows))
        placed, _ = place(spans, slots, self.cache.block_tokens)
        return self._likeliest(self._model(tokens, placed.attention, self.cache, self._attention))

    def _likeliest(self, hidden: Tensor) -> Tensor:
        """hidden [P, hidden] -> [P] int64. Its matrix may have more rows than there are tokens."""
        return self._model.logits(hidden)[:, : self._vocab].argmax(-1)
