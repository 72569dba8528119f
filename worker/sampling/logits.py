"""Logit processors: bias, penalties, and bans, applied before a token is sampled.

Each stage changes only the rows that need it, in place. A stage whose feature no row of the step
uses is skipped (features.py). For the other stages the host selects the rows from the slots' host
copies, so an unused stage launches no kernel. Order: bias, repetition penalty, frequency and
presence penalty, allowed tokens, bad words, end tokens before min_tokens, grammar mask (`bans.py`
has the last four), DRY (`dry.py`), filters of requests with an order of filters
(`filter_chain.py`). Penalties store no state: they read the request's own tokens each time. DRY and
the filters are computed with torch on every device.

Legend: S sampled rows, V vocabulary, N rows that use a stage, L tokens of the longest of them, K
items of the longest list.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from worker.batch.batch import Sampled
from worker.sampling.bans import RowMasks, allow_rows, apply_masks, ban_early_ends, ban_words
from worker.sampling.dry import apply_dry
from worker.sampling.filter_chain import apply_chains
from worker.sampling.slot_lookup import known_tokens, listed_ids, rows_and_slots, where
from worker.slots import features
from worker.slots.table import SlotTable

TORCH_ONLY = features.DRY | features.FILTERS
"""Features whose stages are computed with torch on every device."""

RowFilter = Callable[[SlotTable, Sampled], Tensor]
"""Function that returns which sampled rows need a stage: [S] bool, on the host."""
Stage = Callable[[Tensor, SlotTable, Sampled, Tensor], None]
"""Function of (logits [S, V], slots, sampled, rows [N]). Changes the logits of these rows in place;
`rows` is on the host."""


def process_logits(
    logits: Tensor, slots: SlotTable, sampled: Sampled, masks: RowMasks | None = None
) -> Tensor:
    """Return the processed logits [S, V] float32: `logits` itself if no row needs a stage,
    otherwise a changed copy."""
    work = needed_stages(slots, sampled)
    if not work and masks is None and not sampled.features & TORCH_ONLY:
        return logits
    logits = logits.clone()
    for stage, rows in work:
        stage(logits, slots, sampled, rows)
    if masks is not None:
        apply_masks(logits, masks)
    apply_torch_stages(logits, slots, sampled)
    return logits


def apply_torch_stages(logits: Tensor, slots: SlotTable, sampled: Sampled) -> None:
    """Apply DRY and the chains of filters to logits [S, V], in place."""
    apply_dry(logits, slots, sampled)
    apply_chains(logits, slots, sampled)


def needed_stages(slots: SlotTable, sampled: Sampled) -> list[tuple[Stage, Tensor]]:
    """Return the stages that rows of the step need, in order, each with these rows [N]."""
    candidates = [
        (stage, where(needs_stage(slots, sampled)))
        for feature, needs_stage, stage in STAGES
        if sampled.features & feature
    ]
    return [(stage, rows) for stage, rows in candidates if len(rows)]


# ---- functions of tensors


def add_bias(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values [N, K] to the logits of ids [N, K]; padding has value 0."""
    logits.scatter_add_(1, ids, values)


def penalise_repetition(logits: Tensor, tokens: Tensor, penalty: Tensor) -> None:
    """Make tokens [N, L] less likely by penalty [N]: divide positive logits by it, multiply others
    by it.

    A token that occurs twice is penalised only once, because both writes have the same value.
    """
    old = logits.gather(1, tokens)
    factor = penalty[:, None]
    logits.scatter_(1, tokens, torch.where(old > 0, old / factor, old * factor))


def penalise_counts(
    logits: Tensor, tokens: Tensor, is_answer: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Subtract frequency * count + presence * (count > 0) from the logits [N, V]. `count` is how
    often a token occurs in the answer.

    tokens [N, L]; is_answer [N, L] bool; frequency, presence [N]. Only the logits of `tokens` are
    written. A token that occurs twice is written twice, with the same value.
    """
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    counts.scatter_add_(1, tokens, is_answer.to(torch.int32))
    count = counts.gather(1, tokens)
    cost = frequency[:, None] * count + presence[:, None] * (count > 0)
    logits.scatter_(1, tokens, logits.gather(1, tokens) - cost)


# ---- stages: use the values in the slots of `rows` [N], which index the sampled rows, on the host


def _bias_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    index, slot_ids = rows_and_slots(slots, sampled, rows)
    ids, listed = listed_ids(slots, "bias_ids", "num_bias", sampled.host_slots[rows], slot_ids)
    values = slots["bias_values"][:, : ids.shape[1]].index_select(0, slot_ids)
    part = logits.index_select(0, index)
    add_bias(part, ids, torch.where(listed, values, 0.0))
    logits.index_copy_(0, index, part)


def _repetition_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    index, slot_ids = rows_and_slots(slots, sampled, rows)
    tokens, _ = known_tokens(slots, sampled, rows, slot_ids)
    part = logits.index_select(0, index)
    penalise_repetition(part, tokens, slots["repetition_penalty"].index_select(0, slot_ids))
    logits.index_copy_(0, index, part)


def _additive_rows(logits: Tensor, slots: SlotTable, sampled: Sampled, rows: Tensor) -> None:
    """Apply frequency and presence penalties. Only tokens after the prompt count."""
    index, slot_ids = rows_and_slots(slots, sampled, rows)
    tokens, known = known_tokens(slots, sampled, rows, slot_ids)
    places = torch.arange(tokens.shape[1], device=slots.device)
    is_answer = known & (places >= slots["prompt_len"].index_select(0, slot_ids)[:, None])
    frequency, presence = (
        slots[name].index_select(0, slot_ids) for name in ("frequency_penalty", "presence_penalty")
    )
    part = logits.index_select(0, index)
    penalise_counts(part, tokens, is_answer, frequency, presence)
    logits.index_copy_(0, index, part)


# ---- row filters


def _host(name: str, slots: SlotTable, sampled: Sampled) -> Tensor:
    return slots.host(name)[sampled.host_slots]


def _has_items(count: str) -> RowFilter:
    """Return a filter for rows whose list has items; the field `count` has the number of items."""
    return lambda slots, sampled: _host(count, slots, sampled) > 0


def _is_repetition_penalised(slots: SlotTable, sampled: Sampled) -> Tensor:
    return _host("repetition_penalty", slots, sampled) != 1


def _is_count_penalised(slots: SlotTable, sampled: Sampled) -> Tensor:
    by_count = _host("frequency_penalty", slots, sampled) != 0
    return by_count | (_host("presence_penalty", slots, sampled) != 0)


def _must_not_end(slots: SlotTable, sampled: Sampled) -> Tensor:
    has_ends = _host("num_stop_ids", slots, sampled) > 0
    return has_ends & (sampled.host_known < _host("min_len", slots, sampled))


STAGES: tuple[tuple[int, RowFilter, Stage], ...] = (
    (features.BIAS, _has_items("num_bias"), _bias_rows),
    (features.REPETITION, _is_repetition_penalised, _repetition_rows),
    (features.COUNTS, _is_count_penalised, _additive_rows),
    (features.ALLOWED, _has_items("num_allowed"), allow_rows),
    (features.BAD_WORDS, _has_items("num_bad_words"), ban_words),
    (features.MIN_TOKENS, _must_not_end, ban_early_ends),
)
"""Each stage's feature bit, row filter and function, in the order of application."""
