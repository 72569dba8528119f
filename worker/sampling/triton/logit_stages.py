"""Device code that processes logits before a token is sampled: bias, penalties and bans.

One launch runs all stages but the grammar's masks, in the order of worker/sampling/logits.py, which
is the reference. A program changes only its own block of one row, and runs the stages one after the
other. A barrier separates a write to the block from a read of what another thread wrote.

Penalties depend on how often each token of the block occurs in the row. The program counts them in
a histogram in shared memory, from the row's own tokens. So there are no counts [S, V] in memory,
which would have to be as large as the logits, filled with zeros and read again. The price is that
each block reads the row's tokens, 4 bytes each.

`process_rows` must be launched with EXACT (worker/sampling/row_split.py), so that sums of products
have the bits that torch computes.

Legend: S rows, V vocabulary, N masked rows, B bytes of a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

BANNED = tl.constexpr(float("-inf"))
TOKENS = tl.constexpr(1024)
"""Tokens of a row that are counted at once."""


@triton.jit
def listed(
    ids, counts, slot, start, V, WIDTH: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a slot's list of ids, padded to PAD with arbitrary ids, and which of them are real and
    in the block that begins at `start`."""
    nth = tl.arange(0, PAD)
    is_real = nth < tl.load(counts + slot)
    found = tl.load(ids + slot * WIDTH + nth, is_real, -1)
    return found, is_real & (found >= start) & (found < tl.minimum(start + BLOCK, V))


@triton.jit
def add_to(logits, ids, values, selected):
    """Add values to the logits of the selected ids. Equal ids must have equal values, which are
    added once."""
    old = tl.load(logits + ids, selected, 0.0)
    tl.debug_barrier()
    tl.store(logits + ids, old + values, selected)
    tl.debug_barrier()


@triton.jit
def count_tokens(token_ids, begin, end, start, BLOCK: tl.constexpr):
    """Return how often each token of the block that begins at `start` occurs among the items
    [begin, end) of token_ids, [BLOCK] int32."""
    counts = tl.full((BLOCK,), 0, tl.int32)
    nth = tl.arange(0, TOKENS)
    for at in range(begin, end, TOKENS):
        is_known = at + nth < end
        tokens = tl.load(token_ids + at + nth, is_known, -1) - start
        is_here = is_known & (tokens >= 0) & (tokens < BLOCK)
        counts += tl.histogram(tl.where(is_here, tokens, 0), BLOCK, is_here)
    return counts


@triton.jit
def penalise(x, in_prompt, in_answer, repetition, frequency, presence):
    """Return logits x with the penalties, by how often their tokens occur. A penalty that is off
    (repetition 1, the others 0) changes no bit."""
    is_known = (in_prompt + in_answer) > 0
    x = tl.where(is_known, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    cost = frequency * in_answer.to(tl.float32) + tl.where(in_answer > 0, presence, 0.0)
    return tl.where(is_known, x - cost, x)


@triton.jit
def is_word_complete(
    token_ids,
    position,
    prompt_len,
    bad_ids,
    bad_ends,
    num_words,
    longest,
    MAX_WORDS: tl.constexpr,
):
    """Return the last token of each bad word, and whether the answer ends with its other tokens."""
    nth = tl.arange(0, MAX_WORDS)
    is_word = nth < num_words
    end = tl.load(bad_ends + nth, is_word, 0)
    begin = tl.load(bad_ends + nth - 1, is_word & (nth > 0), 0)
    hit = is_word
    for back in range(1, longest):
        is_part = is_word & (end - 1 - back >= begin)
        token = tl.load(token_ids + position - back, position - back >= prompt_len, -1)
        expected = tl.load(bad_ids + end - 1 - back, is_part, 0)
        hit = hit & ((is_part == 0) | (expected == token))
    return tl.load(bad_ids + end - 1, is_word, -1), hit


@triton.jit(
    do_not_specialize=["copies", "max_len"], do_not_specialize_on_alignment=["slots", "known"]
)
def process_rows(
    logits,
    stride,
    out,
    out_stride,
    slots,
    known,
    token_ids,
    max_len,
    lens,
    prompt_lens,
    min_lens,
    num_bias,
    bias_ids,
    bias_values,
    repetitions,
    frequencies,
    presences,
    num_allowed,
    allowed_ids,
    num_bad_words,
    longest_bad_words,
    bad_ids,
    bad_ends,
    num_stop_ids,
    stop_ids,
    V,
    copies,
    MAX_BIAS: tl.constexpr,
    MAX_ALLOWED: tl.constexpr,
    MAX_WORDS: tl.constexpr,
    MAX_BAD: tl.constexpr,
    MAX_STOPS: tl.constexpr,
    PAD_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one block of one row. If `copies` is not 0, copy `logits` to `out` first; otherwise
    both must be the same.

    logits, out    [S, V] float32, with strides between rows
    slots, known   [S] int64: the row's slot, and the new token's position
    others         fields of the slots, [slots] or [slots, width]
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    slot, position = tl.load(slots + row), tl.load(known + row)
    token_ids += slot * max_len
    out += row * out_stride
    ids = start + tl.arange(0, BLOCK)
    in_block = ids < V
    if copies:
        tl.store(out + ids, tl.load(logits + row * stride + ids, in_block, 0.0), in_block)
        tl.debug_barrier()
    if tl.load(num_bias + slot) > 0:
        biased, here = listed(bias_ids, num_bias, slot, start, V, MAX_BIAS, MAX_BIAS, BLOCK)
        nth = tl.arange(0, MAX_BIAS)
        add_to(out, biased, tl.load(bias_values + slot * MAX_BIAS + nth, here, 0.0), here)
    prompt_len = tl.load(prompt_lens + slot)
    repetition, frequency = tl.load(repetitions + slot), tl.load(frequencies + slot)
    presence = tl.load(presences + slot)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        end = tl.minimum(tl.load(lens + slot), position.to(tl.int32))
        in_prompt = count_tokens(token_ids, 0, tl.minimum(prompt_len, end), start, BLOCK)
        in_answer = count_tokens(token_ids, prompt_len, end, start, BLOCK)
        x = tl.load(out + ids, in_block, 0.0)
        x = penalise(x, in_prompt, in_answer, repetition, frequency, presence)
        tl.store(out + ids, x, in_block)
        tl.debug_barrier()
    if tl.load(num_allowed + slot) > 0:
        allowed, here = listed(
            allowed_ids, num_allowed, slot, start, V, MAX_ALLOWED, MAX_ALLOWED, BLOCK
        )
        kept = tl.load(out + allowed, here, 0.0)
        tl.debug_barrier()
        tl.store(out + ids, tl.full((BLOCK,), BANNED, tl.float32), in_block)
        tl.debug_barrier()
        tl.store(out + allowed, kept, here)
        tl.debug_barrier()
    num_words = tl.load(num_bad_words + slot)
    if num_words > 0:
        last, hit = is_word_complete(
            token_ids,
            position,
            prompt_len,
            bad_ids + slot * MAX_BAD,
            bad_ends + slot * MAX_WORDS,
            num_words,
            tl.load(longest_bad_words + slot),
            MAX_WORDS,
        )
        here = hit & (last >= start) & (last < tl.minimum(start + BLOCK, V))
        add_to(out, last, BANNED, here)
    if (tl.load(num_stop_ids + slot) > 0) & (position < tl.load(min_lens + slot)):
        ends, here = listed(stop_ids, num_stop_ids, slot, start, V, MAX_STOPS, PAD_STOPS, BLOCK)
        tl.store(out + ends, tl.full((PAD_STOPS,), BANNED, tl.float32), here)


@triton.jit(do_not_specialize_on_alignment=["rows", "bits"])
def apply_masks(logits, stride, rows, bits, num_bytes, V, BLOCK: tl.constexpr):
    """Ban the tokens of one block of one row that its mask does not allow.

    logits   [S, V] float32, with a stride between rows; changed in place
    rows     [N] int64: the row of each mask
    bits     [N, B] uint8; bit t % 8 of byte t // 8 is set if token t is allowed
    """
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_block = ids < V
    byte = tl.load(bits + mask * num_bytes + (ids >> 3), in_block, 0).to(tl.int32)
    x = tl.load(logits + row * stride + ids, in_block, 0.0)
    x += tl.where((byte >> (ids & 7)) & 1 != 0, 0.0, BANNED)
    tl.store(logits + row * stride + ids, x, in_block)
