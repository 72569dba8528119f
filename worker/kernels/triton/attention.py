"""Attention over the paged cache, as Triton kernels.

The queries that read the same keys are the rows of one matrix: all heads of a group, and in a
prefill also several tokens. So the keys are read once for all of them, and the scores are a product
of matrices, which tensor cores compute. A program loops over tiles of keys and keeps a running
softmax: the peak of each query's scores, and the sum and the weighted values relative to that peak.

`decode` computes rows of one token, and `prefill` all other rows. Few queries would occupy only a
part of a GPU, so their keys can be split among several programs, whose results `merge` adds up.

Scores are multiplied by log2(e), because a GPU computes powers of 2. Positions outside the window
and the context are never read, neither in the block table nor in the cache. A row whose context is
0 tokens is padding: nothing is read or written for it in these tensors.

Arguments that differ from step to step are not specialised, nor is the alignment of what is
uploaded for a step, and the number of splits is not a constant. So a model needs few variants of
each kernel, and serving does not stop to compile one.

Legend: as in worker/attention/base.py, and G = H / H_kv heads of a group, S splits, W queries in a
tile (heads and tokens), N tokens whose keys are split. D_PADDED is D rounded up to a power of two.

Arguments of the kernels:

q, out         [T, H, D], strides in items; the last stride is 1
k, v           [B, BLOCK_TOKENS, H_kv, D], with equal strides; the last stride is 1
table          [R, M] int32: the block table; the last stride is 1
context_lens   [R] int32
row_starts     [R + 1] int32
sinks          [H] float32, or None
part_out       [N, H, S, D] float32: the result of each split; None if keys are not split
part_logs      [N, H, S] float32: log2 of the sum of each split's weights; -inf if it has no keys
factor         what multiplies the scores: scale * log2(e), or soft_cap * log2(e) with a soft cap
cap_factor     scale / soft_cap; None without a soft cap
window         a token sees this many last tokens; None: all
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
"""The score of a key that a query does not see."""
SEARCHED_ROWS = tl.constexpr(128)
"""Rows whose starts are loaded together by `_row_of_tile`."""


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table", "context_lens"]
)
def decode(
    q,
    k,
    v,
    out,
    table,
    context_lens,
    sinks,
    part_out,
    part_logs,
    factor,
    cap_factor,
    window,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    block_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    IS_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Compute the queries of one row and group against one split of its keys.

    The grid is [H_kv, S, R]. Row r has the token r, so R is the number of decode rows.
    """
    kv_head, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + row)
    first_key = 0
    if window is not None:
        first_key = tl.maximum(context_len - window, 0)
    begin, end = _split_tiles(first_key // TILE_KEYS, tl.cdiv(context_len, TILE_KEYS))

    member = tl.arange(0, TILE_QUERIES)
    dims = tl.arange(0, D_PADDED)
    head = kv_head * GROUP + member
    is_real = member < GROUP
    stored = is_real[:, None] & (dims < D)[None, :]
    splits = tl.num_programs(1)
    part = head * splits + split
    first_part = row * tl.num_programs(0) * GROUP * splits
    if begin >= end:
        if IS_SPLIT:
            nothing = tl.full([TILE_QUERIES], NOTHING, tl.float32)
            tl.store(part_logs + first_part + part, nothing, mask=is_real)
        return

    place = (head * q_head_stride)[:, None] + dims[None, :]
    queries = tl.load(q + row * q_row_stride + place, mask=stored, other=0.0)
    peak, total = _start(sinks, head, is_real, split == 0)
    weighted = tl.zeros([TILE_QUERIES, D_PADDED], tl.float32)
    last = tl.where(is_real, context_len - 1, -1)
    peak, total, weighted = _attend(
        queries,
        peak,
        total,
        weighted,
        last,
        k + kv_head * kv_head_stride,
        v + kv_head * kv_head_stride,
        table + row * table_stride,
        begin,
        end,
        first_key,
        context_len,
        factor,
        cap_factor,
        window,
        block_stride,
        token_stride,
        BLOCK_TOKENS,
        D,
        D_PADDED,
        TILE_KEYS,
        IS_MASKED=True,
    )
    result = weighted * _inverse(total)[:, None]
    if IS_SPLIT:
        tl.store(part_logs + first_part + part, _log2_sum(peak, total), mask=is_real)
        tl.store(part_out + first_part * D + part[:, None] * D + dims[None, :], result, mask=stored)
    else:
        place = (head * out_head_stride)[:, None] + dims[None, :]
        result = result.to(out.dtype.element_ty)
        tl.store(out + row * out_row_stride + place, result, mask=stored)


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "table_stride"],
    do_not_specialize_on_alignment=["table", "context_lens", "row_starts"],
)
def prefill(
    q,
    k,
    v,
    out,
    table,
    context_lens,
    row_starts,
    sinks,
    part_out,
    part_logs,
    first_row,
    num_rows,
    factor,
    cap_factor,
    window,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    block_stride,
    token_stride,
    kv_head_stride,
    table_stride,
    IS_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Compute some tokens of one of the rows [first_row, num_rows), for the heads of one group,
    against one split of their keys.

    The grid is [H_kv, S, number of tiles]. The rows before `first_row` have one token each, so
    `first_row` is also the first token, whose results are the first of part_out.
    The tiles of a row start at the tile
    (row's first token - first_row) // TILE_TOKENS + (row - first_row). So all rows have enough
    tiles, and a few tiles are empty. The last tiles see the most keys, so they are computed first.
    """
    TILE_TOKENS: tl.constexpr = TILE_QUERIES // GROUP
    kv_head, split = tl.program_id(0), tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    row = _row_of_tile(tile, row_starts, first_row, num_rows, TILE_TOKENS).to(tl.int64)
    context_len = tl.load(context_lens + row)
    start = tl.load(row_starts + row)
    num_tokens = tl.load(row_starts + row + 1) - start
    tile -= (start - first_row) // TILE_TOKENS + (row - first_row).to(tl.int32)
    first_token = tile * TILE_TOKENS
    if first_token >= num_tokens:
        return
    num_before = context_len - num_tokens
    end_key = num_before + tl.minimum(first_token + TILE_TOKENS, num_tokens)
    first_key = 0
    if window is not None:
        first_key = tl.maximum(num_before + first_token + 1 - window, 0)
    begin, end = _split_tiles(first_key // TILE_KEYS, tl.cdiv(end_key, TILE_KEYS))

    member = tl.arange(0, TILE_QUERIES)
    dims = tl.arange(0, D_PADDED)
    head = kv_head * GROUP + member % GROUP
    token = first_token + member // GROUP
    is_real = (member < TILE_TOKENS * GROUP) & (token < num_tokens)
    stored = is_real[:, None] & (dims < D)[None, :]
    # Offsets from the tile's first token fit in 32 bits.
    origin = (start + first_token).to(tl.int64)
    num_heads, splits = tl.num_programs(0) * GROUP, tl.num_programs(1)
    part = ((member // GROUP) * num_heads + head) * splits + split
    first_part = (origin - first_row) * num_heads * splits
    if (context_len == 0) | (begin >= end):
        if IS_SPLIT:
            nothing = tl.full([TILE_QUERIES], NOTHING, tl.float32)
            tl.store(part_logs + first_part + part, nothing, mask=is_real)
        return

    place = (member // GROUP) * q_row_stride + head * q_head_stride
    queries = tl.load(
        q + origin * q_row_stride + (place[:, None] + dims[None, :]), mask=stored, other=0.0
    )
    peak, total = _start(sinks, head, is_real, split == 0)
    weighted = tl.zeros([TILE_QUERIES, D_PADDED], tl.float32)
    last = tl.where(is_real, num_before + token, -1)
    masked = begin
    if window is None:
        # All queries see all keys of the tiles before `masked`.
        masked = tl.minimum(tl.maximum((num_before + first_token + 1) // TILE_KEYS, begin), end)
        peak, total, weighted = _attend(
            queries,
            peak,
            total,
            weighted,
            last,
            k + kv_head * kv_head_stride,
            v + kv_head * kv_head_stride,
            table + row * table_stride,
            begin,
            masked,
            first_key,
            end_key,
            factor,
            cap_factor,
            window,
            block_stride,
            token_stride,
            BLOCK_TOKENS,
            D,
            D_PADDED,
            TILE_KEYS,
            IS_MASKED=False,
        )
    peak, total, weighted = _attend(
        queries,
        peak,
        total,
        weighted,
        last,
        k + kv_head * kv_head_stride,
        v + kv_head * kv_head_stride,
        table + row * table_stride,
        masked,
        end,
        first_key,
        end_key,
        factor,
        cap_factor,
        window,
        block_stride,
        token_stride,
        BLOCK_TOKENS,
        D,
        D_PADDED,
        TILE_KEYS,
        IS_MASKED=True,
    )
    result = weighted * _inverse(total)[:, None]
    # If these offsets were those from above, they would occupy registers during the loops. Since 0
    # is added, but not at compile time, the compiler cannot use the same ones.
    member += tl.load(row_starts + row, volatile=True) - start
    head = kv_head * GROUP + member % GROUP
    is_real = (member < TILE_TOKENS * GROUP) & (first_token + member // GROUP < num_tokens)
    stored = is_real[:, None] & (dims < D)[None, :]
    if IS_SPLIT:
        part = ((member // GROUP) * num_heads + head) * splits + split
        tl.store(part_logs + first_part + part, _log2_sum(peak, total), mask=is_real)
        tl.store(part_out + first_part * D + part[:, None] * D + dims[None, :], result, mask=stored)
    else:
        place = (member // GROUP) * out_row_stride + head * out_head_stride
        result = result.to(out.dtype.element_ty)
        tl.store(
            out + origin * out_row_stride + (place[:, None] + dims[None, :]), result, mask=stored
        )


@triton.jit(do_not_specialize=["num_splits"])
def merge(
    part_out,
    part_logs,
    out,
    num_splits,
    out_row_stride,
    out_head_stride,
    MAX_SPLITS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
):
    """Add up the results of the splits of one head and token. The grid is [H, N], and out has N
    tokens."""
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, D_PADDED)
    first_part = (token * tl.num_programs(0) + head) * num_splits
    logs = tl.load(part_logs + first_part + splits, mask=splits < num_splits, other=NOTHING)
    has_keys = logs != NOTHING  # also if the log is NaN
    if tl.max(has_keys.to(tl.int32), 0) == 0:
        return  # padding
    weights = tl.exp2(logs - tl.max(logs, 0))
    read = has_keys[:, None] & (dims < D)[None, :]
    place = splits[:, None] * D + dims[None, :]
    results = tl.load(part_out + first_part * D + place, mask=read, other=0.0)
    result = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    out += token * out_row_stride + head * out_head_stride
    tl.store(out + dims, result.to(out.dtype.element_ty), mask=dims < D)


@triton.jit
def _row_of_tile(tile, row_starts, first_row, num_rows, TILE_TOKENS: tl.constexpr):
    """Return the last row whose first tile is not after `tile`."""
    row = first_row - 1
    for some in range(first_row, num_rows, SEARCHED_ROWS):
        rows = some + tl.arange(0, SEARCHED_ROWS)
        starts = tl.load(row_starts + rows, mask=rows < num_rows, other=0)
        first_tiles = (starts - first_row) // TILE_TOKENS + rows - first_row
        row += tl.sum(((rows < num_rows) & (first_tiles <= tile)).to(tl.int32), 0)
    return row


@triton.jit
def _start(sinks, head, is_real, has_sinks):
    """Return the peak and the sum [W] of a softmax before the first key. A sink, which has no
    value, is part of both; `has_sinks` says whether it belongs to this split."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_real, other=0.0) * LOG2_E
        peak = tl.where(has_sinks, sink, NOTHING)
        total = tl.where(has_sinks, tl.full(head.shape, 1.0, tl.float32), 0.0)
    else:
        peak = tl.full(head.shape, NOTHING, tl.float32)
        total = tl.zeros(head.shape, tl.float32)
    return peak, total


@triton.jit
def _split_tiles(first_tile, end_tile):
    """Return the tiles [begin, end) of this program's split of the tiles [first_tile, end_tile)."""
    count = tl.cdiv(end_tile - first_tile, tl.num_programs(1))
    begin = first_tile + tl.program_id(1) * count
    return begin, tl.minimum(begin + count, end_tile)


@triton.jit
def _log2_sum(peak, total):
    """Return log2 of the sum of the weights [W]: -inf for queries that saw no key."""
    return tl.where(total == 0.0, NOTHING, peak + tl.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def _inverse(total):
    """Return 1 / total [W]; 1 for queries that saw no key, whose results are not used."""
    return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _attend(
    queries,
    peak,
    total,
    weighted,
    last,
    k,
    v,
    table,
    begin,
    end,
    first_key,
    end_key,
    factor,
    cap_factor,
    window,
    block_stride,
    token_stride,
    BLOCK_TOKENS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Continue a softmax with the keys of the tiles [begin, end). Return its new state.

    queries     [W, D_PADDED]
    peak        [W] float32: largest score so far, multiplied by log2(e)
    total       [W] float32: sum of 2 ** (score - peak)
    weighted    [W, D_PADDED] float32: the same sum, of the values
    last        [W] int32: the last key that each query sees; -1 for padding
    k, v        first block of this group's head
    table       the row's blocks
    first_key, end_key   only keys of this range are read
    IS_MASKED   False: all queries see all keys of the tiles
    """
    # Float32 numbers are split into parts that tensor cores multiply, almost without rounding. This
    # has no effect on other dtypes.
    PRECISION: tl.constexpr = "tf32x3"
    dims = tl.arange(0, D_PADDED)
    for tile in range(begin, end):
        keys = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        if IS_MASKED:
            is_read = (keys >= first_key) & (keys < end_key)
            block = tl.load(table + keys // BLOCK_TOKENS, mask=is_read, other=0)
            read = is_read[:, None] & (dims < D)[None, :]
        else:
            block = tl.load(table + keys // BLOCK_TOKENS)
            read = (dims < D)[None, :]
        place = block.to(tl.int64) * block_stride + (keys % BLOCK_TOKENS) * token_stride
        place = place[:, None] + dims[None, :]
        tile_k = tl.load(k + place, mask=read, other=0.0)
        tile_v = tl.load(v + place, mask=read, other=0.0)
        scores = tl.dot(queries, tl.trans(tile_k), input_precision=PRECISION)
        if cap_factor is not None:
            scores = _tanh(scores * cap_factor)
        if IS_MASKED:
            seen = keys[None, :] <= last[:, None]
            if window is not None:
                seen = seen & (keys[None, :] > last[:, None] - window)
            scores = tl.where(seen, scores, NOTHING)
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        shift = new_peak
        if IS_MASKED:
            # A query may have seen nothing so far.
            shift = tl.where(new_peak == NOTHING, 0.0, new_peak)
        weights = tl.exp2(scores * factor - shift[:, None])
        correction = tl.exp2(peak - shift)
        total = total * correction + tl.sum(weights, 1)
        weighted = tl.dot(
            weights.to(tile_v.dtype),
            tile_v,
            weighted * correction[:, None],
            input_precision=PRECISION,
        )
        peak = new_peak
    return peak, total, weighted


@triton.jit
def _tanh(x):
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0.0, -size, size)
