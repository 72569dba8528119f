"""This step's tensors, from the plan and the slots. The shapes of all inputs are told here.

Legend: T tokens in the step, R rows (requests), S sampled places, M most blocks of any row.

A row computes positions [start, start + count) of its request:

    position   0 ........ start ............ known = start + count
               | in cache | computed now    | what is sampled stands here

A row samples at one place, after its last token; one with k drafts, which are its last tokens, at
1 + k places: before each draft as well, as if what comes behind were not there.

All arithmetic is over whole vectors, on the host; indexes travel in one copy, and everything that
depends on a slot's contents is gathered on the device. Most steps have one position in every row,
which is sampled: these are told without arithmetic (`_decodes`, `_tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.steps import StepPlan
from worker.attention.base import AttentionBatch
from worker.sampling.verify import NO_DRAFT
from worker.slots.staging import integers, upload
from worker.slots.table import SlotTable

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The plan's rows, on the host. All [R] int64, but sampled, behind, guesses: [S].

    starts   first position computed;   counts   how many;   known   starts + counts
    ends     one past each row's last token in the step's [T]
    sampled  of each sampled place the index of its row, ascending
    behind   how many of the row's drafts stand behind the place, falling to 0
    guesses  the draft at the place itself; NO_DRAFT where none is
    """

    slots: Ints
    starts: Ints
    counts: Ints
    known: Ints
    ends: Ints
    sampled: Ints
    behind: Ints
    guesses: Ints


@dataclass(frozen=True, slots=True)
class Sampled:
    """The places that get a token. All [S] int64.

    host_slots, host_known   on the host: which slot; tokens before it, so the new one's position
    slots, known             the same on the device
    last                     on the device: index of the token before it in the step's [T]
    extras                   what any row of the step asks for, whether it samples or not
    """

    host_slots: Tensor
    host_known: Tensor
    slots: Tensor
    known: Tensor
    last: Tensor
    extras: int

    def of(self, hidden: Tensor) -> Tensor:
        """Of hidden [T, ...] the rows before these places; not copied where they are all of them,
        since `last` rises."""
        if len(self.last) == len(hidden):
            return hidden
        return hidden.index_select(0, self.last)

    def only(self, places: Ints) -> Sampled:
        """Some of them."""
        (of,) = upload([places], self.slots.device)
        on_host = torch.from_numpy(places)
        return Sampled(
            self.host_slots[on_host],
            self.host_known[on_host],
            self.slots.index_select(0, of),
            self.known.index_select(0, of),
            self.last.index_select(0, of),
            self.extras,
        )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model computes (token_ids [T] int64, attention) and for whom a token is drawn."""

    rows: BatchRows
    token_ids: Tensor
    attention: AttentionBatch
    sampled: Sampled


def read_rows(plan: StepPlan) -> BatchRows:
    """The plan's rows. Raises ValueError where its arrays contradict each other."""
    slots, starts, counts = (
        integers(array.data) for array in (plan.row_slots, plan.row_starts, plan.row_tokens)
    )
    samples = np.frombuffer(plan.row_samples.data, np.uint8)
    if not len(slots) == len(starts) == len(counts) == len(samples):
        raise ValueError(f"step {plan.step}: row arrays differ in length")
    decodes = counts[: plan.num_decodes]
    if not 0 <= plan.num_decodes <= len(slots) or (decodes != 1).any() or (counts < 1).any():
        raise ValueError(
            f"step {plan.step}: rows of one token must be the first {plan.num_decodes}"
        )
    if plan.row_drafts is None and len(decodes) == len(slots) and samples.all():
        return _decodes(slots, starts, counts)
    drafts, ids = _read_drafts(plan, counts, samples)
    places = samples.astype(np.int64) + drafts
    sampled = np.repeat(np.arange(len(slots)), places)
    behind = places.cumsum()[sampled] - 1 - np.arange(len(sampled))
    guesses = np.full(len(sampled), NO_DRAFT, np.int64)
    guesses[behind > 0] = ids
    return BatchRows(
        slots, starts, counts, starts + counts, counts.cumsum(), sampled, behind, guesses
    )


def _decodes(slots: Ints, starts: Ints, counts: Ints) -> BatchRows:
    """Where every row is one position and samples: what `read_rows` says of such rows."""
    rows = np.arange(len(slots))
    none = np.full(len(slots), NO_DRAFT, np.int64)
    return BatchRows(slots, starts, counts, starts + 1, rows + 1, rows, np.zeros_like(rows), none)


def _read_drafts(plan: StepPlan, counts: Ints, samples: NDArray[np.uint8]) -> tuple[Ints, Ints]:
    """How many drafts each row [R] has, and all their ids."""
    if plan.row_drafts is None or plan.drafts is None:
        return np.zeros_like(counts), np.empty(0, np.int64)
    drafts, ids = integers(plan.row_drafts.data), integers(plan.drafts.data)
    if len(drafts) != len(counts) or drafts.min(initial=0) < 0 or drafts.sum() != len(ids):
        raise ValueError(f"step {plan.step}: drafts do not fit its rows")
    if (drafts >= counts).any() or (samples[drafts > 0] == 0).any():
        raise ValueError(f"step {plan.step}: drafts follow a known token, in rows that sample")
    return drafts, ids


def stage_drafts(plan: StepPlan, slots: SlotTable) -> None:
    """Write the plan's drafts where they are read from, as tokens that are known until the step has
    sampled. To be flushed."""
    if plan.row_drafts is None:
        return
    rows = read_rows(plan)
    is_draft = rows.behind > 0
    at = rows.sampled[is_draft]
    positions = (rows.known[rows.sampled] - rows.behind)[is_draft]
    slots.stage_items("token_ids", rows.slots[at], positions, rows.guesses[is_draft])
    drafted = np.unique(at)
    slots.stage_items("len", rows.slots[drafted], np.zeros_like(drafted), rows.known[drafted])


def build_batch(
    plan: StepPlan, rows: BatchRows, slots: SlotTable, *, block_tokens: int
) -> StepBatch:
    """For a plan of at least one row, whose slots are bound and flushed; rows: as `read_rows` reads
    them."""
    max_len = slots.fields["token_ids"].width
    if rows.known.max() > max_len or (
        len(rows.sampled) and rows.known[rows.sampled].max() >= max_len
    ):
        raise ValueError(f"step {plan.step}: a row goes beyond {max_len} tokens")
    known = rows.known[rows.sampled] - rows.behind
    places = (rows.slots[rows.sampled], known, rows.ends[rows.sampled] - 1 - rows.behind)
    spans = Spans(rows.slots, rows.starts, rows.counts, plan.num_decodes)
    placed, (sampled_slots, sampled_known, last) = place(spans, slots, block_tokens, *places)
    sampled = Sampled(
        torch.from_numpy(places[0]),
        torch.from_numpy(known),
        sampled_slots,
        sampled_known,
        last,
        extras_of_rows(slots, rows.slots),
    )
    return StepBatch(rows, placed.token_ids(slots), placed.attention, sampled)


def extras_of_rows(slots: SlotTable, rows: Ints) -> int:
    """The union of what the requests in these slots [R] ask for (features.py). Raises ValueError
    where one is no slot."""
    if rows.min() < 0 or rows.max() >= slots.max_slots:
        raise ValueError(f"a row's slot is none of {slots.max_slots}")
    return int(np.bitwise_or.reduce(slots.host("extras").numpy()[rows]))


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions [start, start + count) of each row's slot. [R] int64, on the host; rows of one
    position come first, `num_decodes` of them."""

    slots: Ints
    starts: Ints
    counts: Ints
    num_decodes: int


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """Spans on the device: where in the flat `token_ids` all tokens [T] int64 stand, and what
    attention asks for."""

    items: Tensor
    attention: AttentionBatch

    def token_ids(self, slots: SlotTable) -> Tensor:
        """[T] int64, where all of them are known."""
        return slots["token_ids"].view(-1).index_select(0, self.items).long()


def place(
    spans: Spans, slots: SlotTable, block_tokens: int, *others: Ints
) -> tuple[PlacedTokens, list[Tensor]]:
    """And `others`, which travel along."""
    known = spans.starts + spans.counts
    slot_of_token, positions, starts = _tokens(spans, known)
    table, width = slots["block_table"], slots.fields["block_table"].width
    blocks, offsets = np.divmod(positions, block_tokens)
    columns = [
        slot_of_token * slots.fields["token_ids"].width + positions,
        slot_of_token * width + blocks,
        offsets,
        positions,
        spans.slots,
        *others,
    ]
    tokens, entries, offset, position, row_slots, *moved = upload(columns, slots.device)
    most_blocks = -(-int(known.max()) // block_tokens)
    attention = AttentionBatch(
        positions=position,
        slot_mapping=offset.add_(table.view(-1).index_select(0, entries), alpha=block_tokens),
        row_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(known),
        block_table=table[:, :most_blocks].index_select(0, row_slots).long(),
        num_decodes=spans.num_decodes,
    )
    return PlacedTokens(tokens, attention), moved


def _tokens(spans: Spans, known: Ints) -> tuple[Ints, Ints, Ints]:
    """slots, positions [T] of all tokens, and where each row's begin: [R + 1]."""
    num_rows = len(spans.slots)
    if spans.num_decodes == num_rows:
        return spans.slots, spans.starts, np.arange(num_rows + 1)
    starts = np.concatenate(([0], spans.counts.cumsum()))
    row_of_token = np.repeat(np.arange(num_rows), spans.counts)
    positions = np.arange(len(row_of_token)) + (known - starts[1:])[row_of_token]
    return spans.slots[row_of_token], positions, starts
