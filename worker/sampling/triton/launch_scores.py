"""Launches the kernels that compute logprobs (scores.py).

Legend: S sampled places, N scored tokens, V vocabulary, K most likely tokens per row, A requested
tokens per row, D of the N scored under both distributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from protocol.engine.sampling import MAX_LOGPROBS
from worker.sampling.row_split import EXACT, WARPS, RowSplit
from worker.sampling.triton import sampling, scores


@dataclass(frozen=True, slots=True)
class ScoredPlaces:
    """The sampled places whose tokens are scored, and the fields of their slots.

    places                 [N] int64
    slots                  [S] int64: the slot of each place
    temperature, kinds     [slots] float32 and int32; `kinds` is the field logprobs_of
    num_asked, asked_ids   [slots] and [slots, width] int32
    columns                A
    """

    places: Tensor
    slots: Tensor
    temperature: Tensor
    kinds: Tensor
    num_asked: Tensor
    asked_ids: Tensor
    columns: int


@dataclass(frozen=True, slots=True)
class DrawSource:
    """The distributions that the tokens of a step were drawn from.

    processed   [S, V] float32 logits
    records     [S, width] int64, see sampling/triton/sampling.py
    of_draws    the kind of logprobs that are computed from these distributions only
    drawn_at    [N] int64: the row of each scored token among the D, or -1
    num_drawn   D
    """

    processed: Tensor
    records: Tensor
    of_draws: int
    drawn_at: Tensor
    num_drawn: int


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The results. The fields are those of LogprobColumns, in the order of the kernel's arguments.

    logprobs [N] float32, ranks [N] int64, possible [N] int64, top_ids [N, K] int64,
    top_logprobs [N, K], asked [N, A], drawn [D, 1 + K + A]
    """

    logprobs: Tensor
    ranks: Tensor
    possible: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    asked: Tensor
    drawn: Tensor


def score_tokens(
    logits: Tensor,
    tokens: Tensor,
    num_top: int,
    split: RowSplit,
    scored: ScoredPlaces | None = None,
    source: DrawSource | None = None,
) -> TokenScores:
    """Return the scores of tokens [S] int64 at some places of logits [S, V] float32.

    split    that of the logits
    scored   None: all places, without requested tokens
    source   None: the model's logits score all tokens
    """
    num, num_top = len(tokens if scored is None else scored.places), min(num_top, split.vocab)
    columns = 0 if scored is None else scored.columns
    result = _empty(num, num_top, columns, 0 if source is None else source.num_drawn, logits.device)
    num_candidates = split.num_blocks * num_top
    records = torch.zeros(num, scores.RECORD.value, dtype=torch.int64, device=logits.device)
    candidates = torch.empty(num, num_candidates, dtype=torch.int64, device=logits.device)
    places = None if scored is None else scored.places
    options: dict[str, Any] = {"num_warps": WARPS, **EXACT}
    rows, row = RowSplit(num, split.vocab, split.block), (logits, logits.stride(0))
    sampling.find_peaks[rows.grid](
        *row,
        places,
        records,
        scores.RECORD.value,
        split.vocab,
        rows.blocks,
        BLOCK=split.block,
        **options,
    )
    inputs = (*row, *_draw_arguments(source), places, *_fields(scored, DRAW_FIELDS))
    options |= {"DRAWS": source is not None, "SCALE": split.scale}
    options["OF_DRAWS"] = -1 if source is None else source.of_draws
    scores.tally_blocks[num, split.num_blocks](
        *inputs, tokens, records, candidates, num_top, split.vocab, BLOCK=split.block, **options
    )
    scores.finish_scores[(num,)](
        *inputs,
        *_fields(scored, ASKED_FIELDS),
        tokens,
        records,
        candidates,
        num_candidates,
        None if source is None else source.drawn_at,
        num_top,
        columns,
        *(getattr(result, name) for name in TokenScores.__slots__),
        MAX_ASKED=1 if scored is None else scored.asked_ids.shape[1],
        CANDIDATES=triton.next_power_of_2(split.num_blocks * MAX_LOGPROBS),
        **options,
    )
    return result


DRAW_FIELDS = ("slots", "temperature", "kinds")
ASKED_FIELDS = ("num_asked", "asked_ids")


def _fields(scored: ScoredPlaces | None, names: tuple[str, ...]) -> list[Tensor | None]:
    return [None if scored is None else getattr(scored, name) for name in names]


def _draw_arguments(
    source: DrawSource | None,
) -> tuple[Tensor | None, int, Tensor | None, int]:
    """Return the kernel arguments for the processed logits and the draws, each with a stride."""
    if source is None:
        return None, 0, None, 0
    processed, draws = source.processed, source.records
    return processed, processed.stride(0), draws, draws.stride(0)


def _empty(
    num: int, num_top: int, columns: int, num_drawn: int, device: torch.device
) -> TokenScores:
    """Return uninitialised results for N tokens."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return TokenScores(
        logprobs=empty(num),
        ranks=empty(num, dtype=torch.int64),
        possible=empty(num, dtype=torch.int64),
        top_ids=empty(num, num_top, dtype=torch.int64),
        top_logprobs=empty(num, num_top),
        asked=empty(num, columns),
        drawn=empty(num_drawn, 1 + num_top + columns),
    )
