"""This step's tensors, from the plan and the slots. The shapes of all inputs are told here.

Legend: T tokens in the step, R rows (requests), S sampled rows, M most blocks of any row.

A row computes positions [start, start + count) of its request:

    position   0 ........ start ............ known = start + count
               | in cache | computed now    | what is sampled stands here

All arithmetic is over whole vectors, on the host; indexes travel in one copy, and everything that
depends on a slot's contents is gathered on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.steps import StepPlan
from worker.attention.base import AttentionBatch
from worker.slots import SlotTable
from worker.staging import integers, upload

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """The plan's rows, on the host. All [R] int64, but sampled: [S], indexes of rows, ascending.

    starts   first position computed;   counts   how many;   known   starts + counts
    ends     one past each row's last token in the step's [T]
    """

    slots: Ints
    starts: Ints
    counts: Ints
    known: Ints
    ends: Ints
    sampled: Ints


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows that get a token. All [S] int64.

    host_slots, host_known   on the host: which slot; tokens known, so the position of the new one
    slots, known             the same on the device
    last                     on the device: index of the row's last token in the step's [T]
    """

    host_slots: Tensor
    host_known: Tensor
    slots: Tensor
    known: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the model computes (token_ids [T] int64, attention) and for whom a token is drawn."""

    rows: Rows
    token_ids: Tensor
    attention: AttentionBatch
    sampled: Sampled


def read_rows(plan: StepPlan) -> Rows:
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
    return Rows(slots, starts, counts, starts + counts, counts.cumsum(), np.flatnonzero(samples))


def build_batch(plan: StepPlan, slots: SlotTable, *, block_tokens: int) -> StepBatch:
    """For a plan of at least one row, whose slots are bound and flushed."""
    rows = read_rows(plan)
    max_len = slots.fields["token_ids"].width
    if rows.known.max() > max_len or (
        len(rows.sampled) and rows.known[rows.sampled].max() >= max_len
    ):
        raise ValueError(f"step {plan.step}: a row goes beyond {max_len} tokens")
    row_of_token = np.repeat(np.arange(len(rows.slots)), rows.counts)
    positions = np.arange(len(row_of_token)) + (rows.known - rows.ends)[row_of_token]
    slot_of_token, row_slots, position_of_token, sampled_slots, sampled_known, last = upload(
        [
            rows.slots[row_of_token],
            rows.slots,
            positions,
            rows.slots[rows.sampled],
            rows.known[rows.sampled],
            rows.ends[rows.sampled] - 1,
        ],
        slots.device,
    )
    most_blocks = -(-int(rows.known.max()) // block_tokens)
    attention = AttentionBatch(
        positions=position_of_token,
        slot_mapping=_slot_mapping(
            slots["block_table"], slot_of_token, position_of_token, block_tokens
        ),
        row_starts=torch.from_numpy(np.concatenate(([0], rows.ends))),
        context_lens=torch.from_numpy(rows.known),
        block_table=slots["block_table"][:, :most_blocks].index_select(0, row_slots).long(),
        num_decodes=plan.num_decodes,
    )
    token_ids = _items(slots["token_ids"], slot_of_token, position_of_token)
    sampled = Sampled(
        torch.from_numpy(rows.slots[rows.sampled]),
        torch.from_numpy(rows.known[rows.sampled]),
        sampled_slots,
        sampled_known,
        last,
    )
    return StepBatch(rows, token_ids, attention, sampled)


def _slot_mapping(table: Tensor, slots: Tensor, positions: Tensor, block_tokens: int) -> Tensor:
    """Where the K/V of each token [T] is written: its block times block_tokens, plus its offset."""
    blocks = _items(table, slots, positions // block_tokens)
    return blocks * block_tokens + positions % block_tokens


def _items(table: Tensor, slots: Tensor, indexes: Tensor) -> Tensor:
    """table[slots[i], indexes[i]] as int64: one gather over the flattened table."""
    return table.view(-1).index_select(0, slots * table.shape[1] + indexes).long()
