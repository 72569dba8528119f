"""Builds the tensors of a step from its plan and the slots, and declares their shapes.

Legend: T tokens in the step, R rows (requests), S sampled positions, M most blocks of any row.

A row computes positions [start, start + count) of its request:

    position   0 ........ start ............ known = start + count
               | in cache | computed now    | the sampled token goes here

A row samples once, after its last token. A row with k drafts, which are its last tokens, samples at
1 + k places: also before each draft, as if that draft and the following tokens did not exist.

The host computes all indexes with arithmetic on whole vectors and uploads them in one copy. The
device gathers what depends on the contents of slots. In most steps every row is one position that
is sampled; `_decodes` and `_tokens` have a shortcut for these steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.engine.attachments import Attachment
from protocol.worker.steps import StepPlan
from worker.attention.base import AttentionBatch
from worker.device.staging import integers, upload
from worker.sampling.verify import NO_DRAFT
from worker.slots.fields import ROPE_SHIFT, STATE
from worker.slots.rope_positions import turn
from worker.slots.states import StepStates
from worker.slots.table import SlotTable
from worker.spec.rope_config import AXES

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The plan's rows, as int64 arrays on the host. One item for each row [R]:

    slots, starts, counts   the row's slot, first computed position, number of computed positions
    known                   starts + counts
    ends                    index after the row's last token among the step's T tokens

    One item for each sampled position [S], grouped by row:

    sampled        index of the row; ascending
    drafts_after   number of the row's drafts after this position; counts down to 0 in each row
    drafts         the draft to verify at this position; NO_DRAFT if there is none
    """

    slots: Ints
    starts: Ints
    counts: Ints
    known: Ints
    ends: Ints
    sampled: Ints
    drafts_after: Ints
    drafts: Ints


@dataclass(frozen=True, slots=True)
class Sampled:
    """The places at which a token is sampled. All tensors are [S] int64.

    host_slots, host_known   on the host: the slot, and the number of tokens before the new one,
                             which is the new one's position
    slots, known             the same on the device
    last                     on the device: index of the token before the place, among the step's T
    features                 union of the features of all rows of the step (slots/features.py)
    """

    host_slots: Tensor
    host_known: Tensor
    slots: Tensor
    known: Tensor
    last: Tensor
    features: int

    def select(self, hidden: Tensor) -> Tensor:
        """Return the hidden states that the places sample from: the rows `last` of hidden [T, ...].
        If `last` has all rows, return `hidden` itself, because `last` ascends."""
        if len(self.last) == len(hidden):
            return hidden
        return hidden.index_select(0, self.last)

    def subset(self, places: Ints) -> Sampled:
        """Return the sampled places with these indexes, in this order."""
        (index,) = upload([places], self.slots.device)
        on_host = torch.from_numpy(places)
        return Sampled(
            self.host_slots[on_host],
            self.host_known[on_host],
            self.slots.index_select(0, index),
            self.known.index_select(0, index),
            self.last.index_select(0, index),
            self.features,
        )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tensors of one step: the model's input (token_ids [T] int64, attention), and the places
    at which a token is sampled."""

    rows: BatchRows
    token_ids: Tensor
    attention: AttentionBatch
    sampled: Sampled


def read_rows(plan: StepPlan) -> BatchRows:
    """Return the plan's rows. Raises ValueError if its arrays contradict each other."""
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
    num_drafts, drafts = _read_drafts(plan, counts, samples)
    places = samples.astype(np.int64) + num_drafts
    sampled = np.repeat(np.arange(len(slots)), places)
    drafts_after = places.cumsum()[sampled] - 1 - np.arange(len(sampled))
    draft_at = np.full(len(sampled), NO_DRAFT, np.int64)
    draft_at[drafts_after > 0] = drafts
    known = starts + counts
    return BatchRows(slots, starts, counts, known, counts.cumsum(), sampled, drafts_after, draft_at)


def _decodes(slots: Ints, starts: Ints, counts: Ints) -> BatchRows:
    """Return the rows of a plan in which every row computes one position and samples. This is the
    shortcut in `read_rows`."""
    rows = np.arange(len(slots))
    none = np.full(len(slots), NO_DRAFT, np.int64)
    return BatchRows(slots, starts, counts, starts + 1, rows + 1, rows, np.zeros_like(rows), none)


def _read_drafts(plan: StepPlan, counts: Ints, samples: NDArray[np.uint8]) -> tuple[Ints, Ints]:
    """Return the number of drafts of each row [R], and the drafts of all rows, concatenated. Raises
    ValueError if they contradict the rows."""
    if plan.row_drafts is None or plan.drafts is None:
        return np.zeros_like(counts), np.empty(0, np.int64)
    drafts, ids = integers(plan.row_drafts.data), integers(plan.drafts.data)
    if len(drafts) != len(counts) or drafts.min(initial=0) < 0 or drafts.sum() != len(ids):
        raise ValueError(f"step {plan.step}: drafts do not match its rows")
    if (drafts >= counts).any() or (samples[drafts > 0] == 0).any():
        raise ValueError(f"step {plan.step}: drafts must follow a known token, in rows that sample")
    return drafts, ids


def stage_drafts(plan: StepPlan, slots: SlotTable) -> None:
    """Stage the plan's drafts in `token_ids`. The slots count them as known tokens until the step
    has sampled."""
    if plan.row_drafts is None:
        return
    rows = read_rows(plan)
    is_draft = rows.drafts_after > 0
    at = rows.sampled[is_draft]
    positions = (rows.known[rows.sampled] - rows.drafts_after)[is_draft]
    slots.stage_items("token_ids", rows.slots[at], positions, rows.drafts[is_draft])
    drafted = np.unique(at)
    slots.stage_items("len", rows.slots[drafted], np.zeros_like(drafted), rows.known[drafted])


def build_batch(
    plan: StepPlan, rows: BatchRows, slots: SlotTable, *, block_tokens: int, num_entries: int = 1
) -> StepBatch:
    """Build the batch of a plan with at least one row, whose slots are bound and flushed. `rows` is
    the result of `read_rows`, and `num_entries` that of the cache. Raises ValueError if a row
    exceeds its slot."""
    max_len = slots.fields["token_ids"].width
    if rows.known.max() > max_len or (
        len(rows.sampled) and rows.known[rows.sampled].max() >= max_len
    ):
        raise ValueError(f"step {plan.step}: a row exceeds {max_len} tokens")
    known = rows.known[rows.sampled] - rows.drafts_after
    places = (rows.slots[rows.sampled], known, rows.ends[rows.sampled] - 1 - rows.drafts_after)
    spans = Spans(rows.slots, rows.starts, rows.counts, plan.num_decodes)
    placed, (sampled_slots, sampled_known, last) = place(
        spans, slots, block_tokens, *places, num_entries=num_entries
    )
    sampled = Sampled(
        torch.from_numpy(places[0]),
        torch.from_numpy(known),
        sampled_slots,
        sampled_known,
        last,
        features_of_rows(slots, rows.slots),
    )
    return StepBatch(rows, placed.token_ids(slots), placed.attention, sampled)


def step_states(plan: StepPlan, rows: BatchRows, slots: SlotTable) -> StepStates | None:
    """Return the recurrent states that the plan's rows continue; None if the model has none. Raises
    ValueError if a state is to be saved at a position that its row does not compute."""
    if STATE not in slots.fields:
        return None
    drafts = np.zeros_like(rows.counts)
    if plan.row_drafts is not None:
        drafts = integers(plan.row_drafts.data)
    at = counts = ids = np.empty(0, np.int64)
    if plan.save_slots and plan.save_lens and plan.save_checkpoints:
        saved, lens, ids = (
            integers(array.data)
            for array in (plan.save_slots, plan.save_lens, plan.save_checkpoints)
        )
        order = np.argsort(rows.slots)
        at = order[np.searchsorted(rows.slots, saved, sorter=order).clip(max=len(order) - 1)]
        counts = lens - rows.starts[at]
        kept = slots.checkpoints[STATE]
        if (
            not len(saved) == len(lens) == len(ids)
            or (rows.slots[at] != saved).any()
            or (counts < 1).any()
            or (counts > rows.counts[at]).any()
            or ids.min() < 1
            or ids.max() >= len(kept)
        ):
            raise ValueError(f"step {plan.step}: a state cannot be saved as planned")
        by_row = np.lexsort((counts, at))
        at, counts, ids = at[by_row], counts[by_row], ids[by_row]
    return StepStates(
        memory=slots[STATE],
        checkpoints=slots.checkpoints[STATE],
        slots=rows.slots,
        starts=rows.starts,
        firsts=rows.ends - rows.counts,
        counts=rows.counts,
        kept=rows.counts - drafts,
        save_rows=at,
        save_counts=counts,
        save_ids=ids,
    )


def features_of_rows(slots: SlotTable, row_slots: Ints) -> int:
    """Return the union of the features of the requests in the slots `row_slots` [R]. Raises
    ValueError for a slot that does not exist."""
    if row_slots.min() < 0 or row_slots.max() >= slots.max_slots:
        raise ValueError(f"a row's slot is outside the {slots.max_slots} slots")
    return int(np.bitwise_or.reduce(slots.host("features").numpy()[row_slots]))


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions [start, start + count) of each row's slot. All arrays are [R] int64, on the host.
    The `num_decodes` rows with one position come first."""

    slots: Ints
    starts: Ints
    counts: Ints
    num_decodes: int


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """The tokens of `Spans`, on the device.

    items       [T] int64 indexes of the tokens in the flat `token_ids`
    attention   input of attention
    """

    items: Tensor
    attention: AttentionBatch

    def token_ids(self, slots: SlotTable) -> Tensor:
        """Return the ids of all tokens, [T] int64. The tokens must be known."""
        return slots["token_ids"].view(-1).index_select(0, self.items).long()


def place(
    spans: Spans, slots: SlotTable, block_tokens: int, *others: Ints, num_entries: int = 1
) -> tuple[PlacedTokens, list[Tensor]]:
    """Return the tokens of the spans on the device. `others` are uploaded in the same copy and
    returned as tensors. `num_entries` is the number of blocks in a column of a block table."""
    known = spans.starts + spans.counts
    slot_of_token, positions, starts = _tokens(spans, known)
    table, width = slots["block_table"], slots.fields["block_table"].width
    blocks, offsets = np.divmod(positions, block_tokens)
    columns = [
        slot_of_token * slots.fields["token_ids"].width + positions,
        slot_of_token * width + blocks * num_entries,
        offsets,
        positions,
        spans.slots,
        *others,
    ]
    is_on_gpu = slots.device.type != "cpu"
    rows = [np.concatenate((starts, known))] if is_on_gpu else []
    tokens, entries, offset, position, row_slots, *moved = upload([*columns, *rows], slots.device)
    sizes = [len(starts), len(known)]
    device_rows = torch.split(moved.pop().int(), sizes) if is_on_gpu else (None, None)
    max_blocks = -(-int(known.max()) // block_tokens)
    used = table[:, : max_blocks * num_entries].index_select(0, row_slots)
    attention = AttentionBatch(
        positions=position,
        slot_mapping=offset,
        row_starts=torch.from_numpy(starts),
        context_lens=torch.from_numpy(known),
        block_table=used,
        num_decodes=spans.num_decodes,
        device_row_starts=device_rows[0],
        device_context_lens=device_rows[1],
    )
    if num_entries > 1:
        attention = _by_entry(attention, table, entries, block_tokens, num_entries)
    else:
        offset.add_(table.view(-1).index_select(0, entries), alpha=block_tokens)
        attention = replace(attention, block_table=used if is_on_gpu else used.long())
    if slots.images and ROPE_SHIFT in slots.fields:
        turned = _rope_positions(spans, position, slots.images)
        attention = replace(attention, rope_positions=turned)
    return PlacedTokens(tokens, attention), moved


def _rope_positions(
    spans: Spans, positions: Tensor, images: Mapping[int, Sequence[Attachment]]
) -> Tensor | None:
    """Return the rotary positions [AXES, T] int64 of tokens at `positions` [T] of their requests;
    None if no row has images.

    images   slot -> the images of its request
    """
    found: Tensor | None = None
    ends = spans.counts.cumsum()
    rows = (spans.slots, spans.starts, ends - spans.counts, ends)
    for slot, start, begin, end in zip(*(column.tolist() for column in rows), strict=True):
        if slot in images:
            if found is None:
                found = positions.repeat(AXES, 1)
            turn(found.numpy()[:, begin:end], start, images[slot])
    return found


def _by_entry(
    batch: AttentionBatch, table: Tensor, first: Tensor, block_tokens: int, num_entries: int
) -> AttentionBatch:
    """Return the batch for the first block of each column; its `further` has those for the others.

    batch   its slot mapping [T] has only offsets in blocks, and its block table
            [R, M * num_entries] has all blocks of each column
    first   [T] index in the flattened `table` of the first block of each token's column
    """
    entries = torch.arange(num_entries, device=table.device)[:, None]
    blocks = table.view(-1).index_select(0, (first + entries).view(-1)).view(num_entries, -1)
    mappings = torch.add(batch.slot_mapping, blocks, alpha=block_tokens)
    by_row = batch.block_table.view(len(batch.block_table), -1, num_entries).permute(2, 0, 1)
    dtype = torch.int64 if table.device.type == "cpu" else torch.int32
    tables = by_row.to(dtype, memory_format=torch.contiguous_format).contiguous()
    batches = [
        replace(batch, slot_mapping=mapping, block_table=block_table)
        for mapping, block_table in zip(mappings, tables, strict=True)
    ]
    return replace(batches[0], further=tuple(batches[1:]))


def _tokens(spans: Spans, known: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the slots and positions [T] of all tokens, and each row's first index [R + 1]."""
    num_rows = len(spans.slots)
    if spans.num_decodes == num_rows:
        return spans.slots, spans.starts, np.arange(num_rows + 1)
    starts = np.concatenate(([0], spans.counts.cumsum()))
    row_of_token = np.repeat(np.arange(num_rows), spans.counts)
    positions = np.arange(len(row_of_token)) + (known - starts[1:])[row_of_token]
    return spans.slots[row_of_token], positions, starts
