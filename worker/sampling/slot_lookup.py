"""Gathers lists and tokens from the slots of some rows, as dense tensors on the device.

`rows` [N], on the host, index the step's sampled rows. A list shorter than the longest is padded
with its first item, and a second tensor marks the real items.

Legend: S sampled rows, N rows of a group, K items of the longest list, L tokens of the longest row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.batch.batch import Sampled
from worker.device.staging import upload_one
from worker.slots.table import SlotTable


def rows_and_slots(slots: SlotTable, sampled: Sampled, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows' indexes [N] and their slots [N] on the device."""
    index = upload_one(rows, slots.device)
    return index, sampled.slots.index_select(0, index)


def known_tokens(
    slots: SlotTable, sampled: Sampled, rows: Tensor, slot_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rows' tokens [N, L] int64, padded with the row's first token, and a mask [N, L]
    bool of those that are not padding.

    A row's tokens end at its slot's length, but not after its sampled place: the slot may contain
    drafts that follow that place.
    """
    longest = int(sampled.host_known[rows].max())
    tokens = slots["token_ids"][:, :longest].index_select(0, slot_ids).long()
    ends = (
        slots["len"]
        .index_select(0, slot_ids)
        .minimum(sampled.known[upload_one(rows, slots.device)])
    )
    return bounded(tokens, ends)


def listed_ids(
    slots: SlotTable, name: str, count: str, host_slots: Tensor, slot_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the lists in slot field `name`, [N, K] int64, padded with their first id, and a mask
    [N, K] bool of the ids that are not padding. The lists' lengths are in slot field `count`."""
    longest = int(slots.host(count)[host_slots].max())
    ids = slots[name][:, :longest].index_select(0, slot_ids).long()
    return bounded(ids, slots[count].index_select(0, slot_ids))


def bounded(items: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return a copy of `items` [N, K] and a mask [N, K] bool of the real items. Each row keeps its
    first `counts` [N] items, at least 1; the others are replaced with the row's first item."""
    known = torch.arange(items.shape[1], device=items.device) < counts[:, None]
    return torch.where(known, items, items[:, :1]), known


def where(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)
