"""A smaller model that proposes tokens. Later steps verify them with the main model.

Its KV cache has the same block ids and block tables as the main model's, and blocks are zeroed in
both caches together, so a request that holds a block holds it in both. The draft model stores no
other state of a request: the plan gives the position at which it starts to compute. K/V that it
computed for proposed tokens is computed again when the real tokens are known. It proposes the most
likely tokens; worker/sampling/verify.py explains why no other choice is needed.

Legend: R rows of the step, Q of them that the draft model computes, P of the Q with proposals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protocol.worker.steps import StepPlan
from worker.attention.base import Attention
from worker.batch.batch import BatchRows, Ints, Spans, place
from worker.device.staging import integers, upload
from worker.kv.cache import PagedCache
from worker.models.base import StepModel
from worker.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The draft model's work in one plan. All arrays are [Q] int64; rows with one position come
    first.

    starts, ends   positions to compute; all their tokens are known
    wanted         number of tokens to propose after them
    offsets        index of a row's first proposal in the result
    """

    slots: Ints
    starts: Ints
    ends: Ints
    wanted: Ints
    offsets: Ints


def read_catch_up(plan: StepPlan, lens: Ints) -> CatchUp | None:
    """Return the draft model's work, or None if the plan has none for it.

    lens   [R] known tokens of each row after the step has sampled

    Raises ValueError if the plan's columns contradict each other.
    """
    if plan.follow_starts is None or plan.follow_tokens is None or plan.wanted is None:
        return None
    columns = (plan.row_slots, plan.follow_starts, plan.follow_tokens, plan.wanted)
    slots, starts, tokens, wanted = (integers(array.data) for array in columns)
    samples = np.frombuffer(plan.row_samples.data, np.uint8)
    if not len(slots) == len(starts) == len(tokens) == len(wanted):
        raise ValueError(f"step {plan.step}: columns of the draft model do not match its rows")
    if (wanted < 0).any() or (wanted[(starts < 0) | (samples == 0)] > 0).any():
        raise ValueError(
            f"step {plan.step}: only rows that sample and use the draft model can have proposals"
        )
    ends = np.where(wanted > 0, lens, starts + tokens)
    rows = np.flatnonzero(starts >= 0)
    if not len(rows) or (starts >= ends)[rows].any() or (ends > lens)[rows].any():
        raise ValueError(f"step {plan.step}: the draft model cannot compute unknown tokens")
    rows = rows[np.argsort(ends[rows] - starts[rows] != 1, kind="stable")]
    offsets = wanted.cumsum() - wanted
    return CatchUp(slots[rows], starts[rows], ends[rows], wanted[rows], offsets[rows])


class DraftModel:
    """The draft model and its cache.

    vocab   number of ids in the main model's vocabulary; no other id is proposed
    """

    def __init__(
        self, model: StepModel, cache: PagedCache, attention: Attention, vocab: int
    ) -> None:
        self._model = model
        self.cache = cache
        self._attention = attention
        self._vocab = vocab

    def catch_up(
        self, plan: StepPlan, slots: SlotTable, lens: Ints, rows: BatchRows, hidden: Tensor
    ) -> Tensor | None:
        """Do the draft model's work of a plan, from the tokens alone (TokenProposer.catch_up)."""
        work = read_catch_up(plan, lens)
        if work is None:
            return None
        counts = work.ends - work.starts
        proposing = np.flatnonzero(work.wanted)
        spans = Spans(work.slots, work.starts, counts, int((counts == 1).sum()))
        last = counts.cumsum()[proposing] - 1
        placed, (at,) = place(spans, slots, self.cache.block_tokens, last)
        hidden = self._model(placed.token_ids(slots), placed.attention, self.cache, self._attention)
        if not len(proposing):
            return None
        return self._propose(work, proposing, self._likeliest(hidden.index_select(0, at)), slots)

    def keep(self, slots: SlotTable, rows: BatchRows, hidden: Tensor) -> None:
        """Keep nothing: the draft model reads no hidden states."""

    def _propose(self, work: CatchUp, rows: Ints, tokens: Tensor, slots: SlotTable) -> Tensor:
        """Return the proposals of all rows. `tokens` [P] are the first proposals of `rows` [P]."""
        proposed = torch.empty(int(work.wanted.sum()), dtype=torch.int64, device=slots.device)
        for nth in range(int(work.wanted.max())):
            if nth:
                unfinished = np.flatnonzero(work.wanted[rows] > nth)
                rows = rows[unfinished]
                (index,) = upload([unfinished], slots.device)
                tokens = self._next(work, rows, nth, tokens.index_select(0, index), slots)
            (at,) = upload([work.offsets[rows] + nth], slots.device)
            proposed.index_copy_(0, at, tokens)
        return proposed

    def _next(
        self, work: CatchUp, rows: Ints, nth: int, tokens: Tensor, slots: SlotTable
    ) -> Tensor:
        """Return proposal number `nth`, counted from 0, of each of these rows. `tokens` are their
        previous proposals."""
        starts = work.ends[rows] + nth - 1
        spans = Spans(work.slots[rows], starts, np.ones_like(starts), len(rows))
        placed, _ = place(spans, slots, self.cache.block_tokens)
        return self._likeliest(self._model(tokens, placed.attention, self.cache, self._attention))

    def _likeliest(self, hidden: Tensor) -> Tensor:
        """Return the most likely tokens [P] int64 after hidden [P, hidden]. The head may have more
        rows than the vocabulary; those are ignored."""
        return self._model.logits(hidden)[:, : self._vocab].argmax(-1)
