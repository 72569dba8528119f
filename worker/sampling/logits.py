"""What parameters do to logits before a token is drawn: bias, penalties, then what is impossible.

Each stage changes, in place, only the rows that ask for it. Stages that no row of the step asks for
are passed by (features.py); of the others, which rows do is decided on the host from the slots'
host twins, so that nothing is launched for what no row uses. Order: bias, repetition penalty,
frequency and presence penalty, allowed tokens, bad words, end tokens before min_tokens, the
grammar's mask (`bans.py` has the last four). Penalties keep no state: what a request has said is
read from its own tokens each time.

Legend: S sampled rows, V vocabulary, N rows that use a stage, L tokens of the longest of them, K
items of the longest list.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.batch.batch import Sampled
from worker.sampling import features
from worker.sampling.bans import RowMasks, allow_rows, ban_words, hold_back_ends, keep_possible
from worker.sampling.slot_lookup import known_tokens, listed_ids, rows_and_slots, where
from worker.slots.table import SlotTable

Asks = Callable[[SlotTable, Sampled], Tensor]
"""Which of the sampled rows want a stage: [S] bool, on the host."""
Stage = Callable[[Tensor, SlotTable, Sampled, Tensor], None]
"""(logits [S, V], slots, sampled, rows [N] on the host): changes these rows of the logits."""


def process_logits(
    logits: Tensor, slots: SlotTable, sampled: Sampled, masks: RowMasks | None = None
) -> Tensor:
    """logits [S, V] float32, unchanged -> the same tensor, or a changed copy if a row asks."""
    asked = [
        (stage, where(asks(slots, sampled)))
        for extra, asks, stage in STAGES
        if sampled.extras & extra
    ]
    work = [(stage, rows) for stage, rows in asked if len(rows)]
    if not work and masks is None:
        return logits
    logits = logits.clone()
    for stage, rows in work:
        stage(logits, slots, sampled, rows)
    if masks is not None:
        keep_possible(logits, masks)
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


# ---- what they need, from the slots; rows [N] index the step's sampled rows, on the host


def _bias_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    of, at = rows_and_slots(slots, sampled, rows)
    ids, listed = listed_ids(slots, "bias_ids", "num_bias", sampled.host_slots[rows], at)
    values = slots["bias_values"][:, : ids.shape[1]].index_select(0, at)
    part = logits.index_select(0, of)
    add_bias(part, ids, torch.where(listed, values, 0.0))
    logits.index_copy_(0, of, part)


def _repetition_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    of, at = rows_and_slots(slots, sampled, rows)
    tokens, _ = known_tokens(slots, sampled, rows, at)
    part = logits.index_select(0, of)
    penalise_repetition(part, tokens, slots["repetition_penalty"].index_select(0, at))
    logits.index_copy_(0, of, part)


def _additive_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    """Only tokens after the prompt count."""
    of, at = rows_and_slots(slots, sampled, rows)
    tokens, known = known_tokens(slots, sampled, rows, at)
    places = torch.arange(tokens.shape[1], device=slots.device)
    said = known & (places >= slots["prompt_len"].index_select(0, at)[:, None])
    frequency, presence = (
        slots[name].index_select(0, at) for name in ("frequency_penalty", "presence_penalty")
    )
    part = logits.index_select(0, of)
    penalise_counts(part, tokens, said, frequency, presence)
    logits.index_copy_(0, of, part)


# ---- who asks for what


def _host(name: str, slots: SlotTable, sampled: Sampled) -> Tensor:
    return slots.host(name)[sampled.host_slots]


def _has(count: str) -> Asks:
    """The rows whose list, of so many items, is not empty."""
    return lambda slots, sampled: _host(count, slots, sampled) > 0


def _is_repetition_penalised(slots: SlotTable, sampled: Sampled) -> Tensor:
    return _host("repetition_penalty", slots, sampled) != 1


def _is_count_penalised(slots: SlotTable, sampled: Sampled) -> Tensor:
    by_count = _host("frequency_penalty", slots, sampled) != 0
    return by_count | (_host("presence_penalty", slots, sampled) != 0)


def _must_go_on(slots: SlotTable, sampled: Sampled) -> Tensor:
    has_ends = _host("num_stop_ids", slots, sampled) > 0
    return has_ends & (sampled.host_known < _host("min_len", slots, sampled))


STAGES: tuple[tuple[int, Asks, Stage], ...] = (
    (features.BIAS, _has("num_bias"), _bias_rows),
    (features.REPETITION, _is_repetition_penalised, _repetition_rows),
    (features.COUNTS, _is_count_penalised, _additive_rows),
    (features.ALLOWED, _has("num_allowed"), allow_rows),
    (features.BAD_WORDS, _has("num_bad_words"), ban_words),
    (features.LATER_END, _must_go_on, hold_back_ends),
)
"""In this order."""
