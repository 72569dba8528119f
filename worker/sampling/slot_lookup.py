"""What the slots of some rows hold, as dense tensors on the device: lists and tokens.

`rows` [N] always index the step's sampled rows, on the host. Where a list is shorter than the
longest, its first item stands in for what is missing, and a second tensor says what is real.

Legend: S sampled rows, N rows of a group, K items of the longest list, L tokens of the longest row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.batch.batch import Sampled
from worker.slots.staging import upload_one
from worker.slots.table import SlotTable


def rows_and_slots(slots: SlotTable, sampled: Sampled, rows: Tensor) -> tuple[Tensor, Tensor]:
    """On the device: the rows' indexes [N] and their slots [N]."""
    of = upload_one(rows, slots.device)
    return of, sampled.slots.index_select(0, of)


def known_tokens(
    slots: SlotTable, sampled: Sampled, rows: Tensor, at: Tensor
) -> tuple[Tensor, Tensor]:
    """tokens [N, L] int64 and where they are real [N, L]; beyond a row's end, its first token.

    A row ends where its slot says, and before the drafts that stand behind its place.
    """
    longest = int(sampled.host_known[rows].max())
    tokens = slots["token_ids"][:, :longest].index_select(0, at).long()
    ends = slots["len"].index_select(0, at).minimum(sampled.known[upload_one(rows, slots.device)])
    return bounded(tokens, ends)


def listed_ids(
    slots: SlotTable, name: str, count: str, host_slots: Tensor, at: Tensor
) -> tuple[Tensor, Tensor]:
    """Lists of ids as [N, K] int64 and where they are real; beyond its end, a list's first id."""
    longest = int(slots.host(count)[host_slots].max())
    ids = slots[name][:, :longest].index_select(0, at).long()
    return bounded(ids, slots[count].index_select(0, at))


def bounded(items: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Items [N, K], beyond counts [N] >= 1 replaced by the row's first; and which are known."""
    known = torch.arange(items.shape[1], device=items.device) < counts[:, None]
    return torch.where(known, items, items[:, :1]), known


def where(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)
