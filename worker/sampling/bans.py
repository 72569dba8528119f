"""What makes tokens impossible: lists of allowed ones, bad words, ends that come too early, masks.

An impossible token's logit is -inf, whatever it was. Where nothing is left, the sampler reports the
row as failed.

Legend: S sampled rows, V vocabulary, N rows that use a stage, W bad words of the row that has most,
J tokens of the longest bad word before its last, K items of the longest list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.steps import Masks, StepPlan
from worker.batch.batch import BatchRows, Sampled
from worker.sampling.slot_lookup import listed_ids, rows_and_slots
from worker.slots.staging import integers, upload, upload_bytes
from worker.slots.table import SlotTable

IMPOSSIBLE = float("-inf")


@dataclass(frozen=True, slots=True)
class RowMasks:
    """of [N] int64: which sampled places; bits [N, B] uint8: bit t % 8 of byte t // 8 is token
    t."""

    of: Tensor
    bits: Tensor


def row_masks(
    plan: StepPlan, rows: BatchRows, masks: object, vocab: int, device: torch.device
) -> RowMasks:
    """`masks` as they came, on the device. Raises ValueError where they are not the plan's."""
    assert plan.masked is not None
    places = integers(plan.masked.data)
    if len(places) and not 0 <= places.min() <= places.max() < len(rows.sampled):
        raise ValueError(f"step {plan.step}: masks for places where nothing is sampled")
    if not isinstance(masks, Masks) or masks.step != plan.step:
        raise ValueError(f"step {plan.step}: its masks did not follow")
    if masks.bits.shape != (len(places), -(-vocab // 32)):
        raise ValueError(f"step {plan.step}: masks {masks.bits.shape} for {len(places)} places")
    (of,) = upload([places], device)
    return RowMasks(of, upload_bytes(masks.bits.data, device).view(len(places), -1))


# ---- the functions


def forbid(logits: Tensor, ids: Tensor) -> None:
    """ids [N, K] become impossible."""
    logits.scatter_(1, ids, IMPOSSIBLE)


def allow_only(logits: Tensor, ids: Tensor) -> None:
    """All but ids [N, K] become impossible."""
    kept = logits.gather(1, ids)
    logits.fill_(IMPOSSIBLE)
    logits.scatter_(1, ids, kept)


def keep_possible(logits: Tensor, masks: RowMasks) -> None:
    """What a masked row's mask does not name becomes impossible.

    The eight tokens of a byte are looked up at once, and -inf is added: on a CPU ten times faster
    than to unpack bits and fill where they are not set.
    """
    eight = _penalties(logits.device).index_select(0, masks.bits.flatten().int())
    logits.index_add_(0, masks.of, eight.view(len(masks.of), -1)[:, : logits.shape[1]])


def _penalties(device: torch.device) -> Tensor:
    """[256, 8] float32: 0 where the byte has the bit, -inf where not."""
    numbers = torch.arange(256, device=device)[:, None]
    is_set = numbers.bitwise_right_shift(torch.arange(8, device=device)).bitwise_and(1).bool()
    return torch.where(is_set, 0.0, IMPOSSIBLE)


# ---- what they need, from the slots; rows [N] index the step's sampled rows, on the host


def allow_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    of, at = rows_and_slots(slots, sampled, rows)
    ids, _ = listed_ids(slots, "allowed_ids", "num_allowed", sampled.host_slots[rows], at)
    part = logits.index_select(0, of)
    allow_only(part, ids)
    logits.index_copy_(0, of, part)


def hold_back_ends(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    of, at = rows_and_slots(slots, sampled, rows)
    ids, _ = listed_ids(slots, "stop_ids", "num_stop_ids", sampled.host_slots[rows], at)
    part = logits.index_select(0, of)
    forbid(part, ids)
    logits.index_copy_(0, of, part)


def ban_words(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    """The last token of a bad word is impossible where the answer ends with all before it."""
    of, at = rows_and_slots(slots, sampled, rows)
    host_slots = sampled.host_slots[rows]
    ends, listed = listed_ids(slots, "bad_ends", "num_bad_words", host_slots, at)
    ids, _ = listed_ids(slots, "bad_ids", "num_bad", host_slots, at)
    last = ids.gather(1, ends - 1)
    hit = listed
    before = int(slots.host("longest_bad_word")[host_slots].max()) - 1
    if before:
        tail, said = _tail(slots, sampled.known[of], at, before)
        hit = listed & _ends_with(ids, ends, tail, said)
    part = logits.index_select(0, of)
    part.scatter_add_(1, last, torch.where(hit, IMPOSSIBLE, 0.0))
    logits.index_copy_(0, of, part)


def _ends_with(ids: Tensor, ends: Tensor, tail: Tensor, said: Tensor) -> Tensor:
    """[N, W] bool: is the answer's tail all of the word but its last token?

    ids [N, K], ends [N, W]: the words; tail, said [N, J]: the answer's tokens, the latest first.
    """
    begins = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    back = torch.arange(1, tail.shape[1] + 1, device=ids.device)
    places = ends[:, :, None] - 1 - back
    words = ids.gather(1, places.clamp_(min=0).flatten(1)).view(places.shape)
    is_equal = (words == tail[:, None]) & said[:, None]
    is_beyond = back >= (ends - begins)[:, :, None]
    return (is_equal | is_beyond).all(2)


def _tail(slots: SlotTable, known: Tensor, at: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The last `count` tokens [N, count] of each row, the latest first; are they the answer's?"""
    positions = known[:, None] - torch.arange(1, count + 1, device=slots.device)
    width = slots.fields["token_ids"].width
    index = at[:, None] * width + positions.clamp(min=0)
    tokens = slots["token_ids"].view(-1)[index].long()
    return tokens, positions >= slots["prompt_len"].index_select(0, at)[:, None]
