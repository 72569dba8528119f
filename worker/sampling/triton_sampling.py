"""Samples the tokens of a step on a GPU, with few launches and without waiting for it.

The kernels read the slots' fields on the device. The host uses its copies of them only to leave out
launches that no row of the step needs. The number of launches does not depend on the number of
rows: a greedy step has three, and any other at most 20. Steps with DRY, a chain of filters
or Mirostat also launch what torch needs for these (logits.py).

Legend: S sampled places, P rows that sample, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from worker.batch.batch import Ints, Sampled
from worker.batch.pending_step import SampledTokens
from worker.device.logprob_columns import LogprobColumns
from worker.device.staging import upload
from worker.sampling.bans import RowMasks
from worker.sampling.logits import TORCH_ONLY, apply_torch_stages, needed_stages
from worker.sampling.logprobs import Scores
from worker.sampling.mirostat import limit_surprise
from worker.sampling.row_split import EXACT, WARPS, DrawnRows, RowSplit
from worker.sampling.sampler import TokenChoice
from worker.sampling.triton import logit_stages
from worker.sampling.triton import sampling as kernels
from worker.sampling.triton.launch_scores import DrawSource, ScoredPlaces, score_tokens
from worker.sampling.verify import NO_DRAFT
from worker.slots.features import DRAW, LOGPROBS
from worker.slots.fields import LOGPROBS_OF
from worker.slots.table import SlotTable

MIN_PLACES = 32
"""Places of a row that are verified together. More than usual, so that one kernel is compiled."""


class TritonSampling:
    """Samples with Triton kernels, see `Sampling` in base.py.

    block   number of tokens that a program reads at once; a power of two
    """

    def __init__(self, block: int = 2048) -> None:
        self._block = block

    def sample(
        self,
        logits: Tensor,
        slots: SlotTable,
        sampled: Sampled,
        *,
        masks: RowMasks | None = None,
        drafts: Ints | None = None,
    ) -> SampledTokens:
        """Sample a token at each place. With drafts, the result also contains the tokens that were
        sampled after a wrong draft, so that the device need not be waited for."""
        split = RowSplit.of(logits, self._block)
        processed = process_logits(logits, slots, sampled, masks, split)
        limits = limit_surprise(processed, slots, sampled)
        drawn = choose(processed, slots, sampled, split, append=drafts is None)
        logprobs = sampled_logprobs(logits, processed, drawn, slots, sampled, split)
        choice = drawn.choice
        mu = None
        if drafts is None:
            if limits is not None:
                mu = limits.advance(processed, choice.tokens, slots, sampled)
            return SampledTokens(choice.tokens, choice.finite, None, logprobs, mu=mu)
        ends = np.flatnonzero(drafts == NO_DRAFT) + 1
        starts = np.concatenate(([0], ends[:-1]))
        counts, finite = verify(choice, slots, sampled, (drafts, starts, ends))
        if limits is not None:
            (first,) = upload([starts], slots.device)
            last = (starts, first + counts - 1)
            mu = limits.advance(processed, choice.tokens, slots, sampled, last)
        return SampledTokens(choice.tokens, finite, counts, logprobs, starts, mu)

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> Scores:
        """Return the scores of tokens [N]. `asked` has no columns."""
        scores = score_tokens(logits, tokens, num_top, RowSplit.of(logits, self._block))
        return Scores(
            scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs, scores.asked
        )


def process_logits(
    logits: Tensor,
    slots: SlotTable,
    sampled: Sampled,
    masks: RowMasks | None,
    split: RowSplit,
) -> Tensor:
    """Return the processed logits [S, V] float32, as `process_logits` of logits.py does. They
    overwrite `logits`, unless a row of the step reports logprobs."""
    is_staged = bool(needed_stages(slots, sampled))
    is_changed = is_staged or masks is not None or bool(sampled.features & TORCH_ONLY)
    processed = logits
    if sampled.features & LOGPROBS and is_changed:
        processed = torch.empty_like(logits) if is_staged else logits.clone()
    grid = (split.rows, split.num_blocks)
    options = {"BLOCK": split.block, "num_warps": WARPS, **EXACT}
    if is_staged:
        logit_stages.process_rows[grid](
            logits,
            logits.stride(0),
            processed,
            processed.stride(0),
            sampled.slots,
            sampled.known,
            slots["token_ids"],
            slots.fields["token_ids"].width,
            *(slots[name] for name in PROCESSED_BY),
            split.vocab,
            int(processed is not logits),
            *_widths(slots),
            **options,
        )
    if masks is not None and len(masks.index):
        logit_stages.apply_masks[len(masks.index), split.num_blocks](
            processed,
            processed.stride(0),
            masks.index,
            masks.bits,
            masks.bits.shape[1],
            split.vocab,
            **options,
        )
    apply_torch_stages(processed, slots, sampled)
    return processed


PROCESSED_BY = (
    "len",
    "prompt_len",
    "min_len",
    "num_bias",
    "bias_ids",
    "bias_values",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "num_allowed",
    "allowed_ids",
    "num_bad_words",
    "longest_bad_word",
    "bad_ids",
    "bad_ends",
    "num_stop_ids",
    "stop_ids",
)
"""Slot fields that `process_rows` reads, in the order of its arguments, without token_ids."""


def _widths(slots: SlotTable) -> tuple[int, ...]:
    """Return the widths of the lists that `process_rows` reads, in the order of its arguments."""
    names = ("bias_ids", "allowed_ids", "bad_ends", "bad_ids", "stop_ids")
    widths = [slots.fields[name].width for name in names]
    return *widths, triton.next_power_of_2(widths[-1])


def choose(
    logits: Tensor, slots: SlotTable, sampled: Sampled, split: RowSplit, *, append: bool
) -> DrawnRows:
    """Sample one token for each row of processed logits [S, V] float32. With `append`, append the
    tokens to the slots, which must be distinct."""
    searches = num_searches(slots, sampled, split.vocab)
    records, totals_at = _new_records(split, searches, logits.device)
    row, record = (logits, logits.stride(0)), (records, records.stride(0))
    options: dict[str, Any] = {"BLOCK": split.block, "num_warps": WARPS, **EXACT}
    kernels.find_peaks[split.grid](*row, None, *record, split.vocab, split.blocks, **options)
    options["SCALE"] = split.scale
    if searches is not None:
        _weigh(logits, slots, sampled, split, records, totals_at, searches, options)
    choice = TokenChoice(
        torch.empty(split.rows, dtype=torch.int64, device=logits.device),
        torch.empty(split.rows, dtype=torch.bool, device=logits.device),
    )
    kernels.choose_tokens[(split.rows,)](
        *row,
        sampled.slots,
        sampled.known,
        slots["temperature"],
        slots["seed"],
        *_ends(slots),
        *record,
        totals_at,
        choice.tokens,
        choice.finite,
        split.vocab,
        int(append),
        DRAW=searches is not None,
        BLOCKS=triton.next_power_of_2(split.num_blocks),
        **options,
    )
    return DrawnRows(records, choice)


def _new_records(split: RowSplit, searches: int | None, device: torch.device) -> tuple[Tensor, int]:
    """Return a record for each row, and the word of a record at which the blocks' weights begin.

    searches   the result of `num_searches`
    """
    digits = (searches or 0) * kernels.NUM_DIGITS.value
    totals_at = kernels.HISTOGRAMS.value + digits * kernels.SIZE.value
    words = totals_at + (0 if searches is None else split.num_blocks)
    width = triton.cdiv(words, 16) * 16
    return torch.zeros(split.rows, width, dtype=torch.int64, device=device), totals_at


def _weigh(
    logits: Tensor,
    slots: SlotTable,
    sampled: Sampled,
    split: RowSplit,
    records: Tensor,
    totals_at: int,
    searches: int,
    options: dict[str, Any],
) -> None:
    """Find the bounds of the rows that draw, digit by digit, and weigh the tokens that are kept."""
    row = (logits, logits.stride(0), sampled.slots)
    fields = [slots[name] for name in ("temperature", "top_k", "top_p")]
    record, end = (records, records.stride(0)), (split.vocab, split.blocks)
    for search in range(searches):
        for digit in range(kernels.NUM_DIGITS.value):
            kernels.add_digits[split.grid](
                *row, *fields, *record, *end, SEARCH=search, DIGIT=digit, **options
            )
    kernels.weigh_blocks[split.grid](
        *row, *fields, slots["min_p"], *record, totals_at, *end, **options
    )


def num_searches(slots: SlotTable, sampled: Sampled, vocab: int) -> int | None:
    """Return how many searches the filters of the step's rows need, 0 to 2; None if all rows are
    greedy. A row with top_k and top_p needs two."""
    if not sampled.features & DRAW:
        return None
    temperature, top_k, top_p = (
        slots.host(name)[sampled.host_slots] for name in ("temperature", "top_k", "top_p")
    )
    draws = temperature > 0
    if not draws.any():
        return None
    searches = ((top_k > 0) & (top_k < vocab)).int() + (top_p < 1).int()
    return int(searches[draws].max())


def verify(
    choice: TokenChoice, slots: SlotTable, sampled: Sampled, places: tuple[Ints, Ints, Ints]
) -> tuple[Tensor, Tensor]:
    """Verify the drafts, and append the last token of each row that belongs to its answer. Return
    the number of these tokens [P] int64, and whether the last one's logits were finite, [P] bool.

    places   the drafts [S], see BatchRows, and each row's first place and the place after its last
             one, [P]
    """
    counts = torch.empty(len(places[1]), dtype=torch.int64, device=slots.device)
    finite = torch.empty(len(places[1]), dtype=torch.bool, device=slots.device)
    kernels.verify_drafts[(len(counts),)](
        choice.tokens,
        choice.finite,
        *upload(places, slots.device),
        sampled.slots,
        sampled.known,
        *_ends(slots),
        counts,
        finite,
        PLACES=max(MIN_PLACES, triton.next_power_of_2(int((places[2] - places[1]).max()))),
        num_warps=1,
    )
    return counts, finite


def sampled_logprobs(
    logits: Tensor,
    processed: Tensor,
    drawn: DrawnRows,
    slots: SlotTable,
    sampled: Sampled,
    split: RowSplit,
) -> LogprobColumns | None:
    """Return logprobs of the sampled tokens [S] for the rows that request them, or None if no row
    does. The logits [S, V] are the model's own, and `processed` those that were drawn from."""
    if not sampled.features & LOGPROBS:
        return None
    counts, kinds, num_asked = (
        slots.host(name)[sampled.host_slots].numpy()
        for name in ("num_logprobs", "logprobs_of", "num_asked")
    )
    rows = np.flatnonzero(counts >= 0)
    if not len(rows):
        return None
    is_both = kinds[rows] == LOGPROBS_OF.index("both")
    both = np.flatnonzero(is_both)
    drawn_at = np.where(is_both, is_both.cumsum() - 1, -1)
    places, device_drawn_at = upload([rows, drawn_at], slots.device)
    columns = int(num_asked[rows].max())
    source = None
    if kinds[rows].any():
        of_draws = LOGPROBS_OF.index("sampling")
        source = DrawSource(processed, drawn.records, of_draws, device_drawn_at, len(both))
    scores = score_tokens(
        logits,
        drawn.choice.tokens,
        int(counts.max()),
        split,
        ScoredPlaces(
            places,
            sampled.slots,
            temperature=slots["temperature"],
            kinds=slots["logprobs_of"],
            num_asked=slots["num_asked"],
            asked_ids=slots["asked_ids"],
            columns=columns,
        ),
        source,
    )
    return LogprobColumns(
        rows=rows,
        counts=counts[rows],
        possible=scores.possible,
        ids=drawn.choice.tokens.index_select(0, places),
        logprobs=scores.logprobs,
        ranks=scores.ranks,
        top_ids=scores.top_ids,
        top_logprobs=scores.top_logprobs,
        asked_counts=num_asked[rows] if columns else None,
        asked=scores.asked if columns else None,
        drawn_at=both if len(both) else None,
        drawn=scores.drawn if len(both) else None,
    )


def _ends(slots: SlotTable) -> tuple[Tensor, int, Tensor]:
    """Return the arguments with which a kernel appends tokens to slots."""
    return slots["token_ids"], slots.fields["token_ids"].width, slots["len"]
