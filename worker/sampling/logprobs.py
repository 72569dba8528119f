"""Computes logprobs of tokens, for rows that request them.

A request chooses the distribution: the model's own, before any sampling parameter; the one that the
token was drawn from, after all parameters; or both. At most CHUNK rows of logits are held at a
time. The normaliser is a sum of integers (exact_probs.py), so a logprob's bits do not depend on
other rows. No function waits for the device; the results are columns to read later.

Legend: N scored tokens, V vocabulary, K most likely tokens per row, A requested tokens per row, D
of the N scored under both distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.engine.sampling import MAX_LOGPROBS
from worker.batch.batch import Sampled, StepBatch
from worker.device.logprob_columns import LogprobColumns
from worker.device.staging import upload, upload_one
from worker.sampling.exact_probs import rows_at_once, scale_bits, weigh
from worker.sampling.sampler import drawn_from
from worker.slots.features import LOGPROBS, PROMPT_LOGPROBS
from worker.slots.fields import LOGPROBS_OF
from worker.slots.table import SlotTable

OF_MODEL = LOGPROBS_OF.index("model")
CHUNK = 64
"""Rows of logits held at once: 64 x 150,000 x 4 bytes is 40 MB."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs and ranks of N tokens.

    logprobs [N] float32, ranks [N] int64       each token's own; rank 1 is the most likely token
    top_ids [N, K] int64, top_logprobs [N, K]   the most likely tokens first, equal ones by id
    asked [N, A] float32                        logprobs of requested tokens
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    asked: Tensor


Scorer = Callable[..., Scores]
"""Function with the arguments of `score`. `asked_ids` is passed only if a request names tokens."""


def score(logits: Tensor, tokens: Tensor, num_top: int, asked_ids: Tensor | None = None) -> Scores:
    """Return the scores of tokens [N] int64 under logits [N, V] float32, in which banned tokens are
    -inf. `num_top` is at most MAX_LOGPROBS. `asked_ids` is [N, A] int64."""
    peaks = logits.amax(-1)
    vocab = logits.shape[1]
    # Torch's exponential is faster than `exact_exp`, and no token is chosen by a logprob.
    mass = weigh((logits - peaks[:, None]).exp_(), vocab).sum(-1)
    normaliser = peaks.double() + (mass * 2.0 ** -scale_bits(vocab)).log_()
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(-1) + 1
    top, top_ids = _most_likely(logits, num_top)
    asked = logits[:, :0] if asked_ids is None else logits.gather(1, asked_ids)
    return Scores(
        (chosen.squeeze(1) - normaliser).float(),
        ranks,
        top_ids,
        (top - normaliser[:, None]).float(),
        (asked - normaliser[:, None]).float(),
    )


def scores_drawn(slots: SlotTable, sampled: Sampled) -> bool:
    """Return whether a row of the step requests logprobs of the distribution that it draws from."""
    if not sampled.features & LOGPROBS:
        return False
    at = sampled.host_slots
    is_scored = slots.host("num_logprobs")[at] >= 0
    return bool((is_scored & (slots.host("logprobs_of")[at] != OF_MODEL)).any())


def sampled_logprobs(
    logits: Tensor, processed: Tensor, tokens: Tensor, slots: SlotTable, sampled: Sampled
) -> LogprobColumns | None:
    """Return logprobs of the sampled tokens [S] for the rows that request them, or None if no row
    does.

    logits [S, V]      the model's own logits
    processed [S, V]   the logits after all logit processors
    """
    if not sampled.features & LOGPROBS:
        return None
    counts = slots.host("num_logprobs")[sampled.host_slots].numpy()
    rows = np.flatnonzero(counts >= 0)
    if not len(rows):
        return None
    (index,) = upload([rows], slots.device)
    kinds = slots.host("logprobs_of")[sampled.host_slots].numpy()[rows]
    is_drawn = kinds == LOGPROBS_OF.index("sampling")

    def logits_of(start: int, stop: int) -> Tensor:
        some, part = rows[start:stop], logits.index_select(0, index[start:stop])
        return _with_drawn(part, is_drawn[start:stop], some, processed, slots, sampled)

    asked_ids, chosen = _asked_ids(slots, sampled, rows), tokens.index_select(0, index)
    scored = _scored(rows, counts[rows], chosen, logits_of, asked_ids)
    if asked_ids is not None:
        asked_counts = slots.host("num_asked")[sampled.host_slots].numpy()[rows]
        scored = replace(scored, asked_counts=asked_counts)
    both = np.flatnonzero(kinds == LOGPROBS_OF.index("both"))
    if not len(both):
        return scored
    reported = _reported_ids(scored, asked_ids, both)
    values = _drawn(reported, rows[both], processed, slots, sampled)
    return replace(scored, drawn_at=both, drawn=values)


def prompt_logprobs(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    slots: SlotTable,
    batch: StepBatch,
    scorer: Scorer = score,
) -> LogprobColumns | None:
    """Return logprobs of the prompt tokens that follow a computed position, for the rows that
    request them, or None if no row does.

    hidden    [T, hidden] the step's hidden states
    project   turns rows of `hidden` into logits
    scorer    `score`, or another function that does the same
    """
    if not batch.sampled.features & PROMPT_LOGPROBS:
        return None
    rows = batch.rows
    counts = slots.host("num_prompt_logprobs").numpy()[rows.slots]
    prompt_len = slots.host("prompt_len").numpy()[rows.slots].astype(np.int64)
    # Position p predicts token p + 1, so the last prompt position predicts no prompt token.
    scored = np.where(counts >= 0, (prompt_len - 1 - rows.starts).clip(0, rows.counts), 0)
    if not scored.any():
        return None
    row_of = np.repeat(np.arange(len(scored)), scored)
    nth = np.arange(len(row_of)) - (scored.cumsum() - scored)[row_of]
    at = (rows.ends - rows.counts)[row_of] + nth
    target = rows.slots[row_of] * slots.fields["token_ids"].width + rows.starts[row_of] + nth + 1
    positions, target_items = upload([at, target], slots.device)
    tokens = slots["token_ids"].view(-1).index_select(0, target_items).long()
    return _scored(
        row_of,
        counts[row_of],
        tokens,
        lambda a, b: project(hidden.index_select(0, positions[a:b])),
        scorer=scorer,
    )


def _with_drawn(
    part: Tensor,
    is_drawn: NDArray[np.bool_],
    rows: NDArray[np.int64],
    processed: Tensor,
    slots: SlotTable,
    sampled: Sampled,
) -> Tensor:
    """Return the logits [n, V] that score the sampled rows `rows` [n].

    A row whose is_drawn [n] is true is scored under the distribution that it drew from. Any other
    row is scored under the model's own logits in `part` [n, V]. `part` is modified.
    """
    at = np.flatnonzero(is_drawn)
    if len(at):
        filtered = _drawn_from(processed, slots, sampled, rows[at])
        part.index_copy_(0, upload_one(torch.from_numpy(at), slots.device), filtered)
    return part


def _reported_ids(
    scored: LogprobColumns, asked_ids: Tensor | None, at: NDArray[np.int64]
) -> Tensor:
    """Return the ids [D, 1 + K + A] of the scored rows `at`: the sampled, the most likely and the
    requested tokens."""
    (index,) = upload([at], scored.ids.device)
    parts = [scored.ids[:, None], scored.top_ids]
    if asked_ids is not None:
        parts.append(asked_ids)
    return torch.cat(parts, 1).index_select(0, index)


def _drawn(
    ids: Tensor, rows: NDArray[np.int64], processed: Tensor, slots: SlotTable, sampled: Sampled
) -> Tensor:
    """Return the logprobs of ids [D, I] under the distributions that the sampled rows `rows` [D]
    drew from. The first id of each row is the sampled token."""
    parts = []
    for start in range(0, len(rows), CHUNK):
        some = slice(start, start + CHUNK)
        filtered = _drawn_from(processed, slots, sampled, rows[some])
        size = rows_at_once(filtered.device)
        pairs = zip(torch.split(filtered, size), torch.split(ids[some], size), strict=True)
        parts += [score(part, chunk[:, 0], 0, chunk).asked for part, chunk in pairs]
    return torch.cat(parts)


def _drawn_from(
    processed: Tensor, slots: SlotTable, sampled: Sampled, rows: NDArray[np.int64]
) -> Tensor:
    return drawn_from(processed, slots, sampled, torch.from_numpy(rows))


def _asked_ids(slots: SlotTable, sampled: Sampled, rows: NDArray[np.int64]) -> Tensor | None:
    """Return the ids [N, A] that the requests of these sampled rows name, padded with 0; None if
    the requests name no ids."""
    host_slots = sampled.host_slots[torch.from_numpy(rows)]
    longest = int(slots.host("num_asked")[host_slots].max())
    if not longest:
        return None
    at = upload_one(host_slots, slots.device)
    ids = slots["asked_ids"][:, :longest].index_select(0, at).long()
    places = torch.arange(longest, device=slots.device)
    return torch.where(places < slots["num_asked"].index_select(0, at)[:, None], ids, 0)


def _most_likely(logits: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return the values and ids of the num_top largest logits, in descending order, equal ones by
    id. The result is always a prefix of the MAX_LOGPROBS largest, so `num_top` does not affect
    which of several equal logits are chosen."""
    if not num_top:
        return logits[:, :0], torch.empty_like(logits[:, :0], dtype=torch.int64)
    values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]))
    ids, by_id = ids.sort(-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values[:, :num_top], ids.gather(1, by_value)[:, :num_top]


def _scored(
    rows: NDArray[np.int64],
    counts: NDArray[np.int32],
    tokens: Tensor,
    logits_of: Callable[[int, int], Tensor],
    asked_ids: Tensor | None = None,
    scorer: Scorer = score,
) -> LogprobColumns:
    """Return the logprobs of tokens [N], computed in chunks. `logits_of(a, b)` returns the logits
    that score tokens [a, b)."""
    num_top, size = int(counts.max()), rows_at_once(tokens.device)
    asked = () if asked_ids is None else (asked_ids,)
    parts = []
    for start in range(0, len(rows), CHUNK):
        some = slice(start, start + CHUNK)
        logits = logits_of(start, min(start + CHUNK, len(rows)))
        columns = (logits, tokens[some], *(ids[some] for ids in asked))
        pieces = zip(*(torch.split(each, size) for each in columns), strict=True)
        parts += [scorer(piece, chosen, num_top, *named) for piece, chosen, *named in pieces]
    top_logprobs = torch.cat([part.top_logprobs for part in parts])
    return LogprobColumns(
        rows=rows,
        counts=counts,
        possible=top_logprobs.isfinite().sum(-1),
        ids=tokens,
        logprobs=torch.cat([part.logprobs for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logprobs=top_logprobs,
        asked=None if asked_ids is None else torch.cat([part.asked for part in parts]),
    )
