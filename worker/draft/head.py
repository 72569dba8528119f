"""The checkpoint's own head proposes tokens (multi-token prediction), which later steps verify.

It is used like a draft model (model.py), with these differences:

- Its entry of a position needs the model's hidden state of the position and the next token. So it
  computes entries at the end of a step, after the step has sampled: those of positions of the step,
  and of the last MAX_HEAD_LAG before it, whose hidden states are kept in the slot. A step in which
  it has nothing to do is a plain one. Entries of positions after wrong drafts are not computed;
  they are written when the position is computed again.
- It cannot make up for other entries that are missing: those of blocks that came without them from
  another engine or a tier, or that a request without drafts has computed. They are zero.
- The last entry of a block in the prefix cache was made of the next token of the request that
  computed it, and another request may have another token there.

Missing and such last entries can make drafts worse, but never an answer wrong, because every draft
is verified. To propose more than one token, the head reads its own hidden state in place of the
model's; these entries are written again, too.

Legend: R rows of the step, Q of them that the head computes, P of the Q with proposals, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protocol.worker.steps import MAX_HEAD_LAG, StepPlan
from worker.attention.base import Attention
from worker.batch.batch import BatchRows, Ints, PlacedTokens, Spans, place
from worker.device.staging import integers, upload
from worker.kv.cache import PagedCache
from worker.models.decoder import DecoderModel
from worker.models.draft_head import DraftHead
from worker.slots.fields import HIDDEN
from worker.slots.table import SlotTable


@dataclass(frozen=True, slots=True)
class HeadWork:
    """The head's work in one plan. All arrays are [Q] int64; rows with one entry come first.

    starts, ends   positions of the entries; the token after each of them is known
    row_starts     first position that the step computes
    firsts         its index among the step's tokens
    wanted         number of tokens to propose after them
    offsets        index of a row's first proposal in the result
    """

    slots: Ints
    starts: Ints
    ends: Ints
    row_starts: Ints
    firsts: Ints
    wanted: Ints
    offsets: Ints


def read_head_work(plan: StepPlan, rows: BatchRows, lens: Ints, max_len: int) -> HeadWork | None:
    """Return the head's work, or None if the plan has none for it.

    lens      [R] known tokens of each row after the step has sampled
    max_len   the most tokens of a slot

    Raises ValueError if the plan's columns contradict each other.
    """
    if plan.follow_starts is None or plan.wanted is None:
        return None
    starts, wanted = integers(plan.follow_starts.data), integers(plan.wanted.data)
    samples = np.frombuffer(plan.row_samples.data, np.uint8) > 0
    if not len(starts) == len(wanted) == len(rows.slots):
        raise ValueError(f"step {plan.step}: columns of the head do not match its rows")
    follows = starts >= 0
    if (wanted < 0).any() or (wanted[~(follows & samples)] > 0).any():
        raise ValueError(f"step {plan.step}: only rows that sample and use the head have proposals")
    lags = (rows.starts - starts)[follows]
    if (lags < 0).any() or (lags > MAX_HEAD_LAG).any():
        raise ValueError(
            f"step {plan.step}: the head starts with a row, or at most {MAX_HEAD_LAG} tokens before"
        )
    ends = np.where(samples, lens - 1, rows.known)
    if (ends >= max_len)[follows].any():
        raise ValueError(f"step {plan.step}: the head needs the token after each position")
    at = np.flatnonzero(follows)
    if not len(at):
        raise ValueError(f"step {plan.step}: the head has no rows")
    at = at[np.argsort(ends[at] - starts[at] != 1, kind="stable")]
    firsts, offsets = rows.ends - rows.counts, wanted.cumsum() - wanted
    columns = (rows.slots, starts, ends, rows.starts, firsts, wanted, offsets)
    return HeadWork(*(column[at] for column in columns))


class HeadDrafter:
    """A model's head and its cache.

    vocab   number of ids in the model's vocabulary; no other id is proposed
    """

    def __init__(
        self,
        head: DraftHead,
        model: DecoderModel,
        cache: PagedCache,
        attention: Attention,
        vocab: int,
    ) -> None:
        self._head = head
        self._model = model
        self.cache = cache
        self._attention = attention
        self._vocab = vocab

    def catch_up(
        self, plan: StepPlan, slots: SlotTable, lens: Ints, rows: BatchRows, hidden: Tensor
    ) -> Tensor | None:
        """Do the head's work of a plan (TokenProposer.catch_up). `hidden` [T, hidden] are the
        model's hidden states before the final norm."""
        work = read_head_work(plan, rows, lens, slots.fields["token_ids"].width)
        if work is None:
            return None
        counts = work.ends - work.starts
        row_ends = counts.cumsum()
        proposing = np.flatnonzero(work.wanted)
        spans = Spans(work.slots, work.starts, counts, int((counts == 1).sum()))
        placed, (last, *sources) = place(
            spans, slots, self.cache.block_tokens, row_ends[proposing] - 1, *_sources(work)
        )
        read = _read(hidden, slots[HIDDEN].view(-1, hidden.shape[1]), *sources)
        states = self._compute(_next_tokens(placed, slots), self._model.normed(read), placed)
        if not len(proposing):
            return None
        return self._propose(work, proposing, states.index_select(0, last), slots)

    def keep(self, slots: SlotTable, rows: BatchRows, hidden: Tensor) -> None:
        """Write the hidden states [T, hidden] of the last positions of each row to its slot. Those
        of wrong drafts are among them; they are written again before they are read."""
        counts = np.minimum(rows.counts, MAX_HEAD_LAG)
        positions = _ranges(rows.known - counts, counts)
        places = np.repeat(rows.slots, counts) * MAX_HEAD_LAG + positions % MAX_HEAD_LAG
        kept = slots[HIDDEN].view(-1, hidden.shape[1])
        if len(places) == len(hidden):
            (to,) = upload([places], slots.device)
        else:
            to, at = upload([places, _ranges(rows.ends - counts, counts)], slots.device)
            hidden = hidden.index_select(0, at)
        kept.index_copy_(0, to, hidden.to(kept.dtype))

    def _compute(self, tokens: Tensor, hidden: Tensor, placed: PlacedTokens) -> Tensor:
        return self._head(tokens, hidden, placed.attention, self.cache, self._attention)

    def _likeliest(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)[:, : self._vocab].argmax(-1)

    def _propose(self, work: HeadWork, rows: Ints, hidden: Tensor, slots: SlotTable) -> Tensor:
        """Return the proposals of all rows. `hidden` [P, hidden] are the head's hidden states of
        the last entries of `rows` [P]."""
        proposed = torch.empty(int(work.wanted.sum()), dtype=torch.int64, device=slots.device)
        tokens = self._likeliest(hidden)
        for nth in range(int(work.wanted.max())):
            if nth:
                unfinished = np.flatnonzero(work.wanted[rows] > nth)
                rows = rows[unfinished]
                (index,) = upload([unfinished], slots.device)
                states = self._head.normed(hidden.index_select(0, index))
                starts = work.ends[rows] + nth - 1
                spans = Spans(work.slots[rows], starts, np.ones_like(starts), len(rows))
                placed, _ = place(spans, slots, self.cache.block_tokens)
                hidden = self._compute(tokens.index_select(0, index), states, placed)
                tokens = self._likeliest(hidden)
            (at,) = upload([work.offsets[rows] + nth], slots.device)
            proposed.index_copy_(0, at, tokens)
        return proposed


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Return starts[i], starts[i] + 1, ... of each range, [sum of counts]."""
    ends = counts.cumsum()
    return np.arange(counts.sum()) + np.repeat(starts - (ends - counts), counts)


def _sources(work: HeadWork) -> tuple[Ints, Ints, Ints, Ints]:
    """Return where the hidden states of the entries are: indexes among the kept ones of all slots,
    and the entries that read them; indexes among those of the step, and the other entries."""
    counts = work.ends - work.starts
    positions = _ranges(work.starts, counts)
    inner = positions - np.repeat(work.row_starts, counts)
    is_kept = inner < 0
    kept = np.repeat(work.slots, counts) * MAX_HEAD_LAG + positions % MAX_HEAD_LAG
    new = np.repeat(work.firsts, counts) + inner
    return (
        kept[is_kept],
        np.flatnonzero(is_kept),
        new[~is_kept],
        np.flatnonzero(~is_kept),
    )


def _read(
    hidden: Tensor, kept: Tensor, from_kept: Tensor, old: Tensor, from_step: Tensor, new: Tensor
) -> Tensor:
    """Return the hidden states of the entries, [E, hidden].

    hidden   [T, hidden] of the step's tokens
    kept     [slots * MAX_HEAD_LAG, hidden] of earlier steps

    The others are those of `_sources`.
    """
    found = hidden.index_select(0, from_step)
    if not len(old):
        return found
    read = hidden.new_empty((len(old) + len(new), hidden.shape[1]))
    read.index_copy_(0, old, kept.index_select(0, from_kept).to(read.dtype))
    return read.index_copy_(0, new, found)


def _next_tokens(placed: PlacedTokens, slots: SlotTable) -> Tensor:
    """Return the token after each of the placed ones, [E] int64."""
    return slots["token_ids"].view(-1).index_select(0, placed.items + 1).long()
