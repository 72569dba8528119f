"""What parameters do to logits before a token is drawn: bias, penalties, end tokens.

Each function changes, in place, only the rows that it is given; which rows those are is decided on
the host from the slots' host twins, so that nothing is launched for what no row uses. Order: bias,
repetition penalty, frequency and presence penalty, mask of end tokens. Penalties keep no state:
what a request has said is read from its own tokens each time.

Legend: S sampled rows, V vocabulary, N rows that use a function, L tokens of the longest of them,
K items of the longest list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.batch import Sampled
from worker.slots import SlotTable
from worker.staging import upload_one


def process_logits(logits: Tensor, slots: SlotTable, sampled: Sampled) -> Tensor:
    """logits [S, V] float32, unchanged -> the same tensor, or a changed copy if a row asks."""
    biased = slots.host("num_bias")[sampled.host_slots] > 0
    repeats = slots.host("repetition_penalty")[sampled.host_slots] != 1
    adds = (slots.host("frequency_penalty")[sampled.host_slots] != 0) | (
        slots.host("presence_penalty")[sampled.host_slots] != 0
    )
    minded = (slots.host("num_stop_ids")[sampled.host_slots] > 0) & (
        sampled.host_known < slots.host("min_len")[sampled.host_slots]
    )
    if not bool((biased | repeats | adds | minded).any()):
        return logits
    logits = logits.clone()
    if bool(biased.any()):
        _bias_rows(logits, slots, sampled, _where(biased))
    if bool(repeats.any()):
        _repetition_rows(logits, slots, sampled, _where(repeats))
    if bool(adds.any()):
        _additive_rows(logits, slots, sampled, _where(adds))
    if bool(minded.any()):
        _mask_rows(logits, slots, sampled, _where(minded))
    return logits


# ---- the functions


def add_bias(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """logits[n, ids[n, k]] += values[n, k]; ids, values [N, K], value 0 where a list has ended."""
    logits.scatter_add_(1, ids, values)


def penalise_repetition(logits: Tensor, tokens: Tensor, penalty: Tensor) -> None:
    """Make tokens [N, L] less likely by penalty [N]: divide what is positive, multiply the rest.

    A token that occurs twice is penalised once: both writes carry the same value.
    """
    old = logits.gather(1, tokens)
    factor = penalty[:, None]
    logits.scatter_(1, tokens, torch.where(old > 0, old / factor, old * factor))


def penalise_counts(
    logits: Tensor, tokens: Tensor, said: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """logits -= frequency * count + presence * (count > 0), for the counts of tokens where `said`.

    tokens [N, L]; said [N, L] bool; frequency, presence [N]. Only columns in `tokens` are written,
    with values that depend on the column alone, so equal tokens write the same.
    """
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    counts.scatter_add_(1, tokens, said.to(torch.int32))
    count = counts.gather(1, tokens)
    cost = frequency[:, None] * count + presence[:, None] * (count > 0)
    logits.scatter_(1, tokens, logits.gather(1, tokens) - cost)


def forbid(logits: Tensor, ids: Tensor) -> None:
    """ids [N, K] become impossible."""
    logits.scatter_(1, ids, float("-inf"))


# ---- what they need, from the slots; rows [N] index the step's sampled rows, on the host


def _bias_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    of, at = _rows_and_slots(slots, sampled, rows)
    ids, listed = _list(slots, "bias_ids", "num_bias", sampled.host_slots[rows], at)
    values = slots["bias_values"][:, : ids.shape[1]].index_select(0, at)
    part = logits.index_select(0, of)
    add_bias(part, ids, torch.where(listed, values, 0.0))
    logits.index_copy_(0, of, part)


def _repetition_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    of, at = _rows_and_slots(slots, sampled, rows)
    tokens, _ = _known_tokens(slots, sampled, rows, at)
    part = logits.index_select(0, of)
    penalise_repetition(part, tokens, slots["repetition_penalty"].index_select(0, at))
    logits.index_copy_(0, of, part)


def _additive_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    """Only tokens after the prompt count."""
    of, at = _rows_and_slots(slots, sampled, rows)
    tokens, known = _known_tokens(slots, sampled, rows, at)
    places = torch.arange(tokens.shape[1], device=slots.device)
    said = known & (places >= slots["prompt_len"].index_select(0, at)[:, None])
    frequency, presence = (
        slots[name].index_select(0, at) for name in ("frequency_penalty", "presence_penalty")
    )
    part = logits.index_select(0, of)
    penalise_counts(part, tokens, said, frequency, presence)
    logits.index_copy_(0, of, part)


def _mask_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    of, at = _rows_and_slots(slots, sampled, rows)
    ids, _ = _list(slots, "stop_ids", "num_stop_ids", sampled.host_slots[rows], at)
    part = logits.index_select(0, of)
    forbid(part, ids)
    logits.index_copy_(0, of, part)


def _rows_and_slots(slots: SlotTable, sampled: Sampled, rows: Tensor) -> tuple[Tensor, Tensor]:
    """On the device: the rows' indexes [N] and their slots [N]."""
    of = upload_one(rows, slots.device)
    return of, sampled.slots.index_select(0, of)


def _known_tokens(
    slots: SlotTable, sampled: Sampled, rows: Tensor, at: Tensor
) -> tuple[Tensor, Tensor]:
    """tokens [N, L] int64 and where they are real [N, L]; beyond a row's end, its first token."""
    longest = int(sampled.host_known[rows].max())
    tokens = slots["token_ids"][:, :longest].index_select(0, at).long()
    return _bounded(tokens, slots["len"].index_select(0, at))


def _list(
    slots: SlotTable, name: str, count: str, host_slots: Tensor, at: Tensor
) -> tuple[Tensor, Tensor]:
    """Lists of ids as [N, K] int64 and where they are real; beyond its end, a list's first id."""
    longest = int(slots.host(count)[host_slots].max())
    ids = slots[name][:, :longest].index_select(0, at).long()
    return _bounded(ids, slots[count].index_select(0, at))


def _bounded(items: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Items [N, K], beyond counts [N] >= 1 replaced by the row's first; and which are known."""
    known = torch.arange(items.shape[1], device=items.device) < counts[:, None]
    return torch.where(known, items, items[:, :1]), known


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)
