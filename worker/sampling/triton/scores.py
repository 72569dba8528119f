"""Device code that computes logprobs: an exact normaliser, ranks and the most likely tokens.

The rules are those of worker/sampling/logprobs.py, which is the reference. No launch sorts the
vocabulary.

The most likely tokens of each block of the vocabulary are found one by one, and then those of the
row among them. Equal logits are ordered by id, also where the list ends.

A scored token has a record of four words: PEAK and MASS as in sampling.py, and LARGER. They are 0
before the first launch. The record of its place (sampling.py) describes what the token was drawn
from. The kernels must be launched with EXACT (worker/sampling/row_split.py).

Legend: S sampled places, N scored tokens, V vocabulary, C blocks of the vocabulary, K most likely
tokens of a row, A requested tokens of a row, D tokens with logprobs under both distributions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.triton.exact_numbers import (
    exp,
    is_finite,
    key_token,
    key_value,
    peak_key,
    weight,
)
from worker.sampling.triton.sampling import BOUND, MASS, PEAK

LARGER = tl.constexpr(1)
"""Number of tokens that are more likely than the scored one."""
RECORD = tl.constexpr(4)


@triton.jit
def log_mass(record, SCALE: tl.constexpr):
    """Return the logarithm of the sum of the shares, float64."""
    mass = tl.maximum(tl.load(record + MASS), 1)  # 0 in a row that is not finite
    return tl.log(mass.to(tl.float64) * (1.0 / SCALE))


@triton.jit
def log_shares(processed, draws, temperature, ids, selected):
    """Return the logarithms of the shares that a place's token was drawn from; -inf for tokens that
    a filter removed.

    processed   [V] the place's processed logits
    draws       the place's record
    """
    x = tl.load(processed + ids, selected, float("-inf"))
    gaps = tl.div_rn(x - key_value(tl.load(draws + PEAK)), temperature)
    bound = tl.load(draws + BOUND).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(exp(gaps) >= bound, gaps, float("-inf"))


@triton.jit
def as_logprob(x, normaliser):
    return (x.to(tl.float64) - normaliser).to(tl.float32)


@triton.jit
def store_drawn(out, processed, draws, temperature, ids, selected, SCALE: tl.constexpr):
    """Write the logprobs of tokens under the distribution that a place's token was drawn from. The
    arguments are those of `log_shares`."""
    x = log_shares(processed, draws, temperature, ids, selected)
    tl.store(out, as_logprob(x, log_mass(draws, SCALE)), selected)


@triton.jit
def scores_of(
    logits, processed, draws, temperature, is_of_draws, ids, selected, DRAWS: tl.constexpr
):
    """Return the logits that score a place's tokens: the model's, or the logarithms of the shares
    that its token was drawn from."""
    x = tl.load(logits + ids, selected, float("-inf"))
    if DRAWS:
        if is_of_draws:
            x = log_shares(processed, draws, temperature, ids, selected)
    return x


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["places", "slots"])
def tally_blocks(
    logits,
    stride,
    processed,
    processed_stride,
    draws,
    draws_width,
    places,
    slots,
    temperatures,
    kinds,
    tokens,
    records,
    candidates,
    num_top,
    V,
    DRAWS: tl.constexpr,
    OF_DRAWS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one block of one row to the record of the scored token, and write the block's most likely
    tokens.

    logits, processed     [S, V] float32, with strides between rows
    draws                 [S, draws_width] int64: the records of the places
    places                [N] int64; None: token n is sampled at place n
    slots, tokens         [S] int64
    temperatures, kinds   the slots' fields; OF_DRAWS is the kind that is scored by the draws. Only
                          with DRAWS
    records               [N, RECORD] int64, with peaks
    candidates            [N, C, num_top] int64: the result, as `peak_key` packs it
    """
    n = tl.program_id(0).to(tl.int64)
    place = n
    if places is not None:
        place = tl.load(places + n)
    temperature = 1.0
    is_of_draws = False
    if DRAWS:
        slot = tl.load(slots + place)
        temperature = tl.load(temperatures + slot)
        is_of_draws = tl.load(kinds + slot) == OF_DRAWS
        processed += place * processed_stride
        draws += place * draws_width
    logits += place * stride
    record = records + n * RECORD
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    in_block = ids < V
    x = scores_of(logits, processed, draws, temperature, is_of_draws, ids, in_block, DRAWS)
    peak = key_value(tl.load(record + PEAK))
    if DRAWS:
        peak = tl.where(is_of_draws, 0.0, peak)
    tl.atomic_add(record + MASS, tl.sum(weight(exp(x - peak), SCALE), 0), sem="relaxed")
    token = tl.load(tokens + place)
    own = scores_of(logits, processed, draws, temperature, is_of_draws, token, True, DRAWS)
    tl.atomic_add(record + LARGER, tl.sum((x > own).to(tl.int64), 0), sem="relaxed")
    keys = tl.where(in_block, peak_key(x, ids), 0)
    candidates += (n * tl.num_programs(1) + block) * num_top
    for nth in range(0, num_top):
        best = tl.max(keys, 0)
        tl.store(candidates + nth, best)
        keys = tl.where(keys == best, 0, keys)


@triton.jit(
    do_not_specialize=["num_candidates", "num_top", "columns"],
    do_not_specialize_on_alignment=["places", "slots", "drawn_at"],
)
def finish_scores(
    logits,
    stride,
    processed,
    processed_stride,
    draws,
    draws_width,
    places,
    slots,
    temperatures,
    kinds,
    num_asked,
    asked_ids,
    tokens,
    records,
    candidates,
    num_candidates,
    drawn_at,
    num_top,
    columns,
    logprobs,
    ranks,
    possible,
    top_ids,
    top_logprobs,
    asked,
    drawn,
    DRAWS: tl.constexpr,
    OF_DRAWS: tl.constexpr,
    MAX_ASKED: tl.constexpr,
    SCALE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write the scores of one token. Most arguments are those of `tally_blocks`.

    num_asked, asked_ids   the slots' fields, [slots] and [slots, MAX_ASKED]; None without `slots`
    candidates             [N, num_candidates] int64; num_candidates is at most CANDIDATES
    drawn_at               [N] int64: the token's row in `drawn`, or -1; only with DRAWS
    columns                A, the number of columns of `asked`; missing ids are 0

    The results are logprobs [N] float32, ranks [N] int64, possible [N] int64, top_ids
    [N, num_top] int64, top_logprobs [N, num_top] and asked [N, A] float32, and drawn
    [D, 1 + num_top + A] float32, the logprobs of all these tokens under the distribution that the
    place's token was drawn from.
    """
    n = tl.program_id(0).to(tl.int64)
    place = n
    if places is not None:
        place = tl.load(places + n)
    slot = place
    temperature = 1.0
    is_of_draws = False
    drawn_row = tl.full((), -1, tl.int64)
    if slots is not None:
        slot = tl.load(slots + place)
    if DRAWS:
        temperature = tl.load(temperatures + slot)
        is_of_draws = tl.load(kinds + slot) == OF_DRAWS
        drawn_row = tl.load(drawn_at + n)
        processed += place * processed_stride
        draws += place * draws_width
        drawn += tl.maximum(drawn_row, 0) * (1 + num_top + columns)
    logits += place * stride
    record = records + n * RECORD
    normaliser = log_mass(record, SCALE)
    if is_of_draws == 0:
        normaliser += key_value(tl.load(record + PEAK)).to(tl.float64)
    token = tl.load(tokens + place)
    own = scores_of(logits, processed, draws, temperature, is_of_draws, token, True, DRAWS)
    tl.store(logprobs + n, as_logprob(own, normaliser))
    tl.store(ranks + n, tl.load(record + LARGER) + 1)
    if DRAWS:
        if drawn_row >= 0:
            store_drawn(drawn, processed, draws, temperature, token, True, SCALE)
    lane = tl.arange(0, CANDIDATES)
    keys = tl.load(candidates + n * num_candidates + lane, lane < num_candidates, 0)
    num_possible = tl.full((), 0, tl.int64)
    for nth in range(0, num_top):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, 0, keys)
        value, top = key_value(best), key_token(best)
        tl.store(top_ids + n * num_top + nth, top)
        value = as_logprob(value, normaliser)
        num_possible += is_finite(value).to(tl.int64)
        tl.store(top_logprobs + n * num_top + nth, value)
        if DRAWS:
            if drawn_row >= 0:
                store_drawn(drawn + 1 + nth, processed, draws, temperature, top, True, SCALE)
    tl.store(possible + n, num_possible)
    if asked_ids is not None:
        nth = tl.arange(0, MAX_ASKED)
        is_column = nth < columns
        is_asked = is_column & (nth < tl.load(num_asked + slot))
        ids = tl.load(asked_ids + slot * MAX_ASKED + nth, is_asked, 0)
        x = scores_of(logits, processed, draws, temperature, is_of_draws, ids, is_column, DRAWS)
        tl.store(asked + n * columns + nth, as_logprob(x, normaliser), is_column)
        if DRAWS:
            if drawn_row >= 0:
                at = drawn + 1 + num_top + nth
                store_drawn(at, processed, draws, temperature, ids, is_column, SCALE)
