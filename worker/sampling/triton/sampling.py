"""Device code that samples tokens: without sorting the vocabulary, in a fixed number of launches.

The rules are those of worker/sampling/sampler.py, which is the reference. Everything that is summed
over the vocabulary is an integer, and a row's peak is a maximum. So a result depends neither on the
order in which the programs of a launch run nor on how many of them share a row. A bound on the
shares is found by its three digits of ten bits. To find a digit, each program adds the weights of
its tokens to the row's histogram, and the programs of the next launch search that histogram.

Most kernels must be launched with EXACT (worker/sampling/row_split.py). Triton compiles a kernel
again for an argument that is a multiple of 16, or 1. Arguments for which this is true in some
steps only, such as tensors that were uploaded together, are excluded from that. So is the width of
the slots, `max_len`, which differs between the steps that measure memory and those that serve.

Each row has a record of int64 words, which is 0 before the first launch. The words from HISTOGRAMS
on are the histograms, SIZE words for each digit of each search, and then the weight that each block
of the vocabulary keeps.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.triton.exact_numbers import (
    is_finite,
    key_token,
    key_value,
    peak_key,
    relative_share,
    uniform,
    weight,
)

PEAK = tl.constexpr(0)
"""The largest logit and its token, as `peak_key` packs them."""
FLOOR = tl.constexpr(1)
"""Bits of the share at which the first search ended."""
BOUND = tl.constexpr(2)
"""Bits of the smallest share that the filters keep."""
MASS = tl.constexpr(3)
"""Sum of the weights that the filters keep."""
FOUND = tl.constexpr(4)
"""Four words for each of two searches: the digits found before the second and the third digit, and
what remains of the target."""
HISTOGRAMS = tl.constexpr(16)

DIGIT_BITS = tl.constexpr(10)
SIZE = tl.constexpr(1024)
NUM_DIGITS = tl.constexpr(3)


# ---- searches


@triton.jit
def next_digit(histogram, target):
    """Return the largest digit such that the weights in it and in larger ones reach `target`, and
    the target minus the weights of larger digits. The digit is 0 if they do not reach it."""
    place = tl.arange(0, SIZE)
    weights = tl.load(histogram + (place ^ (SIZE - 1)))
    reached = tl.cumsum(weights, 0) >= target
    at = tl.min(tl.where(reached, place, SIZE - 1), 0)
    larger = tl.sum(tl.where(place < at, weights, 0), 0)
    return (at ^ (SIZE - 1)).to(tl.int64), target - larger


@triton.jit
def nucleus_target(histogram, top_p):
    """Return the weight that the tokens kept by top_p must have in total, at least 1."""
    mass = tl.sum(tl.load(histogram + tl.arange(0, SIZE)), 0)
    target = tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(target, 1), mass)


@triton.jit
def digits_before(record, SEARCH: tl.constexpr, DIGIT: tl.constexpr, by_count, top_k, top_p):
    """Return the digits found in earlier rounds of a search, as one number, and the part of the
    target that remains for the digits from DIGIT on."""
    histogram = record + HISTOGRAMS + (SEARCH * NUM_DIGITS + DIGIT - 1) * SIZE
    if DIGIT == 1:
        found = tl.full((), 0, tl.int64)
        if by_count:
            target = top_k.to(tl.int64)
        else:
            target = nucleus_target(histogram, top_p)
    else:
        found = tl.load(record + FOUND + SEARCH * 4 + (DIGIT - 2) * 2)
        target = tl.load(record + FOUND + SEARCH * 4 + (DIGIT - 2) * 2 + 1)
    digit, target = next_digit(histogram, target)
    return found * SIZE + digit, target


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["rows"])
def find_peaks(logits, stride, rows, records, width, V, blocks, BLOCK: tl.constexpr):
    """Write the peak of each row to its record. Program (r, p) reads `blocks` blocks of row r.

    logits    [S, V] float32, with a stride between rows
    rows      [R] int64: the rows of `logits` to read; None: all of them
    records   [R, width] int64
    """
    row = tl.program_id(0).to(tl.int64)
    record = records + row * width
    if rows is not None:
        row = tl.load(rows + row)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), 0, tl.int64)
    start = tl.program_id(1) * blocks * BLOCK
    for block in range(start, tl.minimum(start + blocks * BLOCK, V), BLOCK):
        ids = block + lane
        x = tl.load(logits + row * stride + ids, ids < V, 0.0)
        best = tl.maximum(best, tl.where(ids < V, peak_key(x, ids), 0))
    tl.atomic_max(record + PEAK, tl.max(best, 0), sem="relaxed")


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["slots"])
def add_digits(
    logits,
    stride,
    slots,
    temperatures,
    top_ks,
    top_ps,
    records,
    width,
    V,
    blocks,
    SEARCH: tl.constexpr,
    DIGIT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the tokens of some blocks to the histogram of digit number DIGIT.

    Search 0 finds the top_k-th share in rows with top_k, and the bound of top_p in others. Search 1
    finds the bound of top_p in rows that have both. Rows without the search do nothing.

    logits                         [S, V] float32, with a stride between rows
    slots                          [S] int64
    temperatures, top_ks, top_ps   the slots' fields
    records                        [S, width] int64
    """
    row = tl.program_id(0).to(tl.int64)
    record = records + row * width
    slot = tl.load(slots + row)
    temperature, top_k = tl.load(temperatures + slot), tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    peak = key_value(tl.load(record + PEAK))
    has_count = (top_k > 0) & (top_k < V)
    has_mass = top_p < 1
    searches = (has_count & has_mass) if SEARCH == 1 else (has_count | has_mass)
    if (temperature > 0) & is_finite(peak) & searches:
        by_count = has_count & (SEARCH == 0)
        floor = tl.full((), 0, tl.int64)
        before = tl.full((), 0, tl.int64)
        if SEARCH == 1:
            if DIGIT == 0:
                floor, _ = digits_before(record, 0, NUM_DIGITS, True, top_k, top_p)
                if tl.program_id(1) == 0:
                    tl.store(record + FLOOR, floor)
            else:
                floor = tl.load(record + FLOOR)
        if DIGIT > 0:
            before, target = digits_before(record, SEARCH, DIGIT, by_count, top_k, top_p)
            if tl.program_id(1) == 0:
                tl.store(record + FOUND + SEARCH * 4 + (DIGIT - 1) * 2, before)
                tl.store(record + FOUND + SEARCH * 4 + (DIGIT - 1) * 2 + 1, target)
        SHIFT: tl.constexpr = (NUM_DIGITS - 1 - DIGIT) * DIGIT_BITS
        histogram = record + HISTOGRAMS + (SEARCH * NUM_DIGITS + DIGIT) * SIZE
        lane = tl.arange(0, BLOCK)
        start = tl.program_id(1) * blocks * BLOCK
        for block in range(start, tl.minimum(start + blocks * BLOCK, V), BLOCK):
            ids = block + lane
            x = tl.load(logits + row * stride + ids, ids < V, float("-inf"))
            share = relative_share(x, peak, temperature)
            bits = share.to(tl.int32, bitcast=True)
            weights = tl.where(by_count, (bits > 0).to(tl.int64), weight(share, SCALE))
            counts = (weights > 0) & (bits >= floor) & ((bits >> SHIFT >> DIGIT_BITS) == before)
            digit = (bits >> SHIFT) & (SIZE - 1)
            tl.atomic_add(histogram + digit, weights, counts, sem="relaxed")


@triton.jit(do_not_specialize=["totals_at", "blocks"], do_not_specialize_on_alignment=["slots"])
def weigh_blocks(
    logits,
    stride,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    records,
    width,
    totals_at,
    V,
    blocks,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write two results to the record of each row that draws a token: the smallest relative share
    that may be drawn (the bound), and how much weight each block of the vocabulary keeps. The
    blocks' weights begin at word `totals_at` of the record. Other arguments as for `add_digits`."""
    row = tl.program_id(0).to(tl.int64)
    record = records + row * width
    slot = tl.load(slots + row)
    temperature, top_k = tl.load(temperatures + slot), tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    peak = key_value(tl.load(record + PEAK))
    if (temperature > 0) & is_finite(peak):
        has_count = (top_k > 0) & (top_k < V)
        has_mass = top_p < 1
        found = tl.full((), 0, tl.int64)
        if has_count & has_mass:
            found, _ = digits_before(record, 1, NUM_DIGITS, False, top_k, top_p)
        elif has_count | has_mass:
            found, _ = digits_before(record, 0, NUM_DIGITS, has_count, top_k, top_p)
        bound = found.to(tl.int32).to(tl.float32, bitcast=True)
        bound = tl.maximum(bound, tl.load(min_ps + slot))
        if tl.program_id(1) == 0:
            tl.store(record + BOUND, bound.to(tl.int32, bitcast=True).to(tl.int64))
        lane = tl.arange(0, BLOCK)
        start = tl.program_id(1) * blocks * BLOCK
        for block in range(start, tl.minimum(start + blocks * BLOCK, V), BLOCK):
            ids = block + lane
            x = tl.load(logits + row * stride + ids, ids < V, float("-inf"))
            share = relative_share(x, peak, temperature)
            kept = tl.where(share >= bound, weight(share, SCALE), 0)
            tl.store(record + totals_at + block // BLOCK, tl.sum(kept, 0))


# ---- tokens


@triton.jit
def draw_token(
    logits_row,
    record,
    peak,
    temperature,
    seed,
    position,
    totals_at,
    V,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Return the first token whose running sum of kept weights exceeds u times the total. Write the
    total to the record."""
    nth = tl.arange(0, BLOCKS)
    totals = tl.load(record + totals_at + nth, nth < tl.cdiv(V, BLOCK), 0)
    mass = tl.sum(totals, 0)
    tl.store(record + MASS, mass)
    point = (mass.to(tl.float64) * uniform(seed, position)).to(tl.int64)
    block = tl.min(tl.where(tl.cumsum(totals, 0) > point, nth, BLOCKS - 1), 0)
    point -= tl.sum(tl.where(nth < block, totals, 0), 0)
    bound = tl.load(record + BOUND).to(tl.int32).to(tl.float32, bitcast=True)
    lane = tl.arange(0, BLOCK)
    ids = block * BLOCK + lane
    x = tl.load(logits_row + ids, ids < V, float("-inf"))
    share = relative_share(x, peak, temperature)
    running = tl.cumsum(tl.where(share >= bound, weight(share, SCALE), 0), 0)
    return (block * BLOCK + tl.min(tl.where(running > point, lane, BLOCK - 1), 0)).to(tl.int64)


@triton.jit(
    do_not_specialize=["totals_at", "appends", "max_len"],
    do_not_specialize_on_alignment=["slots", "known"],
)
def choose_tokens(
    logits,
    stride,
    slots,
    known,
    temperatures,
    seeds,
    token_ids,
    max_len,
    lens,
    records,
    width,
    totals_at,
    tokens,
    finite,
    V,
    appends,
    DRAW: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write one row's token, and whether its logits were finite. If `appends` is not 0, also append
    the token to its slot.

    slots, known                [S] int64: the row's slot, and the new token's position
    temperatures, seeds, lens   the slots' fields; token_ids [slots, max_len]
    tokens [S] int64, finite [S] bool: the results
    """
    row = tl.program_id(0).to(tl.int64)
    record = records + row * width
    slot, position = tl.load(slots + row), tl.load(known + row)
    key = tl.load(record + PEAK)
    peak = key_value(key)
    is_valid = is_finite(peak)
    token = tl.where(is_valid, key_token(key), 0)
    if DRAW:
        temperature = tl.load(temperatures + slot)
        if is_valid & (temperature > 0):
            token = draw_token(
                logits + row * stride,
                record,
                peak,
                temperature,
                tl.load(seeds + slot),
                position,
                totals_at,
                V,
                SCALE,
                BLOCK,
                BLOCKS,
            )
    tl.store(tokens + row, token)
    tl.store(finite + row, is_valid)
    if appends:
        append_token(token_ids, max_len, lens, slot, position, token)


@triton.jit
def append_token(token_ids, max_len, lens, slot, position, token):
    """Append a token to the text of `slot`: write it at `position`, and set the slot's length to
    `position` + 1."""
    tl.store(token_ids + slot * max_len + position, token.to(tl.int32))
    tl.store(lens + slot, (position + 1).to(tl.int32))


@triton.jit(
    do_not_specialize=["max_len"],
    do_not_specialize_on_alignment=["drafts", "starts", "ends", "slots", "known"],
)
def verify_drafts(
    tokens,
    finite,
    drafts,
    starts,
    ends,
    slots,
    known,
    token_ids,
    max_len,
    lens,
    counts,
    row_finite,
    PLACES: tl.constexpr,
):
    """Count the tokens of one row that belong to its answer (worker/sampling/verify.py), and append
    the last of them to its slot. The others equal their drafts, which are in the slot already.

    tokens, finite, drafts, slots, known   [S] of the sampled places
    starts, ends                           [P] int64: each row's places
    counts [P] int64, row_finite [P] bool: the results. A row has at most PLACES places
    """
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts + row), tl.load(ends + row)
    nth = tl.arange(0, PLACES)
    is_place = start + nth < end
    token = tl.load(tokens + start + nth, is_place, 0)
    is_right = (token == tl.load(drafts + start + nth, is_place, 0)) & (
        tl.load(finite + start + nth, is_place, 0) != 0
    )
    count = tl.min(tl.where(is_place & (is_right == 0), nth, PLACES), 0) + 1
    last = start + count - 1
    tl.store(counts + row, count.to(tl.int64))
    tl.store(row_finite + row, tl.load(finite + last) != 0)
    slot, position = tl.load(slots + last), tl.load(known + last)
    append_token(token_ids, max_len, lens, slot, position, tl.load(tokens + last))
