"""Bans tokens: allowed-token lists, bad words, end tokens before min_tokens, and grammar masks.

A banned token's logit becomes -inf. If a row has no token left, the sampler reports the row as
failed.

Legend: S sampled rows, V vocabulary, N rows that use a stage, W most bad words of a row, J tokens
of the longest bad word without its last, K items of the longest list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.worker.steps import Masks, StepPlan
from worker.batch.batch import BatchRows, Sampled
from worker.device.staging import integers, upload, upload_bytes
from worker.sampling.slot_lookup import listed_ids, rows_and_slots
from worker.slots.table import SlotTable

BANNED = float("-inf")


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of N sampled places.

    index   [N] int64, the places
    bits    [N, B] uint8; bit t % 8 of byte t // 8 is set if token t is allowed
    """

    index: Tensor
    bits: Tensor


def row_masks(
    plan: StepPlan, rows: BatchRows, masks: object, vocab: int, device: torch.device
) -> RowMasks:
    """Upload the masks of a plan that has masked places. Raises ValueError if `masks` is not the
    `Masks` message of this plan."""
    assert plan.masked is not None
    places = integers(plan.masked.data)
    if len(places) and not 0 <= places.min() <= places.max() < len(rows.sampled):
        raise ValueError(f"step {plan.step}: masks for places that do not exist")
    if not isinstance(masks, Masks) or masks.step != plan.step:
        raise ValueError(f"step {plan.step}: the next message must hold its masks")
    if masks.bits.shape != (len(places), -(-vocab // 32)):
        raise ValueError(f"step {plan.step}: masks {masks.bits.shape} for {len(places)} places")
    (index,) = upload([places], device)
    return RowMasks(index, upload_bytes(masks.bits.data, device).view(len(places), -1))


# ---- functions of tensors


def ban(logits: Tensor, ids: Tensor) -> None:
    """Ban each row's ids [N, K] in logits [N, V]."""
    logits.scatter_(1, ids, BANNED)


def allow_only(logits: Tensor, ids: Tensor) -> None:
    """Ban all tokens of logits [N, V] except each row's ids [N, K]."""
    kept = logits.gather(1, ids)
    logits.fill_(BANNED)
    logits.scatter_(1, ids, kept)


def apply_masks(logits: Tensor, masks: RowMasks) -> None:
    """Ban the tokens that the masks do not allow.

    Each byte of a mask selects eight penalties, 0 or -inf, which are added to the logits. On a CPU
    this is ten times faster than unpacking the bits and filling.
    """
    penalties = _penalties(logits.device).index_select(0, masks.bits.flatten().int())
    logits.index_add_(0, masks.index, penalties.view(len(masks.index), -1)[:, : logits.shape[1]])


def _penalties(device: torch.device) -> Tensor:
    """Return a table [256, 8] float32 by byte and bit: 0 if the bit is set in the byte, else
    -inf."""
    numbers = torch.arange(256, device=device)[:, None]
    is_set = numbers.bitwise_right_shift(torch.arange(8, device=device)).bitwise_and(1).bool()
    return torch.where(is_set, 0.0, BANNED)


# ---- stages: use the ids in the slots of `rows` [N], which index the sampled rows, on the host


def allow_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    """Ban, in each of `rows` [N] of logits [S, V], all tokens except the allowed tokens of its
    request."""
    index, slot_ids = rows_and_slots(slots, sampled, rows)
    ids, _ = listed_ids(slots, "allowed_ids", "num_allowed", sampled.host_slots[rows], slot_ids)
    part = logits.index_select(0, index)
    allow_only(part, ids)
    logits.index_copy_(0, index, part)


def ban_early_ends(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    """Ban, in each of `rows` [N] of logits [S, V], the stop tokens of its request."""
    index, slot_ids = rows_and_slots(slots, sampled, rows)
    ids, _ = listed_ids(slots, "stop_ids", "num_stop_ids", sampled.host_slots[rows], slot_ids)
    part = logits.index_select(0, index)
    ban(part, ids)
    logits.index_copy_(0, index, part)


def ban_words(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    """Ban, in each of `rows` [N] of logits [S, V], the last token of each bad word whose other
    tokens are the end of the row's answer."""
    index, slot_ids = rows_and_slots(slots, sampled, rows)
    host_slots = sampled.host_slots[rows]
    ends, listed = listed_ids(slots, "bad_ends", "num_bad_words", host_slots, slot_ids)
    ids, _ = listed_ids(slots, "bad_ids", "num_bad", host_slots, slot_ids)
    last = ids.gather(1, ends - 1)
    hit = listed
    before = int(slots.host("longest_bad_word")[host_slots].max()) - 1
    if before:
        tail, is_answer = _tail(slots, sampled.known[index], slot_ids, before)
        hit = listed & _ends_with(ids, ends, tail, is_answer)
    part = logits.index_select(0, index)
    part.scatter_add_(1, last, torch.where(hit, BANNED, 0.0))
    logits.index_copy_(0, index, part)


def _ends_with(ids: Tensor, ends: Tensor, tail: Tensor, is_answer: Tensor) -> Tensor:
    """Return for each bad word whether the answer ends with all its tokens but the last, [N, W]
    bool.

    ids [N, K], ends [N, W]   the bad words, concatenated, and the end of each
    tail, is_answer [N, J]    the row's latest tokens, latest first, and which belong to the answer
    """
    starts = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    back = torch.arange(1, tail.shape[1] + 1, device=ids.device)
    places = ends[:, :, None] - 1 - back
    words = ids.gather(1, places.clamp_(min=0).flatten(1)).view(places.shape)
    is_equal = (words == tail[:, None]) & is_answer[:, None]
    is_beyond = back >= (ends - starts)[:, :, None]
    return (is_equal | is_beyond).all(2)


def _tail(slots: SlotTable, known: Tensor, slot_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's last tokens [N, count], latest first, and which of them belong to the
    answer."""
    positions = known[:, None] - torch.arange(1, count + 1, device=slots.device)
    width = slots.fields["token_ids"].width
    index = slot_ids[:, None] * width + positions.clamp(min=0)
    tokens = slots["token_ids"].view(-1)[index].long()
    return tokens, positions >= slots["prompt_len"].index_select(0, slot_ids)[:, None]
