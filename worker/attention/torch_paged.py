"""Attention over the paged cache with torch's own kernels, on any device.

Rows of one token (decode) are grouped by their number of blocks, rounded up to a power of two. Each
group needs one gather and one call of scaled_dot_product_attention (SDPA), so there is no Python
loop over requests. A row of several tokens (prefill) needs one gather, and one SDPA call for each
tile of its queries. A tile reads keys only up to the position of its last query.

With a window, a row's first gathered block is the one with the first key that its first query sees.
So the copied keys do not grow with the text, and freed blocks are not gathered. Positions in masks
are counted from the start of that block.

Keys are always gathered in whole blocks and always masked, even if nothing is hidden, so that the
kernel takes the same path for any padding of the table. Masked values must still be finite, because
0 * NaN is NaN. So blocks are zeroed before they are first written, and padding refers to the null
block.

On the CPU in float32, the bits of a decode row's output depend neither on the other rows of the
step nor on the number of threads. In bfloat16 with several threads, the last bit of some values may
differ.

Legend: as in base.py, and b rows in a group, m blocks gathered per row, N = m * block_tokens,
G = H / H_kv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention, softmax

from protocol.engine.kv_window import num_passed_blocks
from worker.attention.base import AttentionBatch
from worker.device.staging import upload_one
from worker.kv.rounding import numbers_of

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""`_attend` with its scale and soft cap bound: (q, k, v, mask, sinks) -> attention."""
MAX_GATHERED_TOKENS = 1 << 11
"""Most tokens gathered for one group; a longer row is a group by itself. The copied keys and values
then fit into the CPU's and the allocator's caches. With 16 rows of 1,000 tokens, this is three
times as fast as one group."""
QUERY_MULTIPLE = 4
"""The queries that share keys are padded with zeros to a multiple of this. With other numbers, the
float32 bits of the CPU kernel were seen to depend on the thread that computes a row, presumably
because of the alignment of its scratch memory. With multiples of 4 they never did (tested with 1 to
4 threads, 1 to 12 queries, head dims 8 to 128)."""
TILE_QUERIES = 128
"""Most queries in a tile. This limits the size of the mask, and the work spent on keys that the
causal mask hides."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that are computed by one SDPA call."""

    #: [b] indexes of the rows in the step; None means the first b rows.
    rows: Tensor | None
    #: [b * m]: the blocks of the first row, then of the next one, and so on.
    blocks: Tensor
    #: [b], on the CPU: the first block to gather of each row; None: all start with their first.
    first: Tensor | None
    #: [b, 1, 1, N]: 0 for visible keys, -inf for hidden ones.
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of a prefill row in one SDPA call: the tokens [start, stop) of the step."""

    start: int
    stop: int
    #: The queries read this many keys of the span, from its first key on.
    num_keys: int
    #: [stop - start, num_keys]: 0 for visible keys, -inf for hidden ones.
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A row of several tokens, cut into tiles. All tiles read the same gathered keys."""

    #: [m]: the blocks of the row, in order, from the first one that is gathered on.
    blocks: Tensor
    tiles: list[Tile]
    #: Index of the row in the step, and of the first block in its block table.
    row: int
    first_block: int


@dataclass(frozen=True, slots=True)
class PagedPlan:
    groups: list[DecodeGroup]
    spans: list[PrefillSpan]


class TorchPagedAttention:
    """Attention over the paged cache with torch's own kernels.

    dtype   dtype of the model and of the masks, so that no layer has to convert a mask
    """

    is_capturable = False

    def __init__(self, block_tokens: int, dtype: torch.dtype) -> None:
        self._block_tokens = block_tokens
        self._dtype = dtype

    def plan(
        self, batch: AttentionBatch, window: int | None = None, like: PagedPlan | None = None
    ) -> PagedPlan:
        if like is not None:
            return self._with_blocks(like, batch)
        num_rows = len(batch.context_lens)
        first_blocks = self._first_blocks(batch, window)
        groups = [
            self._group(batch, rows, m, first_blocks, window)
            for rows, m in self._decode_groups(batch, first_blocks)
        ]
        spans = [self._span(batch, row, window) for row in range(batch.num_decodes, num_rows)]
        return PagedPlan(groups, spans)

    def _with_blocks(self, plan: PagedPlan, batch: AttentionBatch) -> PagedPlan:
        """Return the plan with the blocks of another block table."""
        table = batch.block_table
        groups = []
        for group in plan.groups:
            m = group.mask.shape[-1] // self._block_tokens
            rows = (
                table[: batch.num_decodes]
                if group.rows is None
                else table.index_select(0, group.rows)
            )
            blocks = _blocks_from(rows, group.first, m).flatten()
            groups.append(replace(group, blocks=blocks))
        spans = []
        for span in plan.spans:
            end = span.first_block + len(span.blocks)
            blocks = table[span.row, span.first_block : end].contiguous()
            spans.append(replace(span, blocks=blocks))
        return PagedPlan(groups, spans)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: PagedPlan,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attend = partial(_attend, scale=scale, soft_cap=soft_cap)
        if not plan.spans and len(plan.groups) == 1 and plan.groups[0].rows is None:
            return _decode(q, k_cache, v_cache, plan.groups[0], attend, sinks)
        out = torch.empty_like(q)
        for group in plan.groups:
            if group.rows is None:
                num_rows = group.mask.shape[0]
                out[:num_rows] = _decode(q[:num_rows], k_cache, v_cache, group, attend, sinks)
            else:
                chosen = q.index_select(0, group.rows)
                result = _decode(chosen, k_cache, v_cache, group, attend, sinks)
                out.index_copy_(0, group.rows, result)
        for span in plan.spans:
            _prefill(out, q, k_cache, v_cache, span, attend, sinks)
        return out

    def _first_blocks(self, batch: AttentionBatch, window: int | None) -> Tensor | None:
        """Return the first block to gather for each decode row, on the CPU; None: all start with
        their first block."""
        lens = batch.context_lens[: batch.num_decodes]
        if window is None or not len(lens) or int(lens.max()) < window + self._block_tokens:
            return None
        # num_passed_blocks for each row: its query is at position lens - 1
        return (lens - window).clamp_(min=0) // self._block_tokens

    def _decode_groups(
        self, batch: AttentionBatch, first_blocks: Tensor | None
    ) -> Iterator[tuple[list[int], int]]:
        """Yield the decode rows of each group, and the number of blocks to gather for each row."""
        lens = batch.context_lens[: batch.num_decodes]
        if first_blocks is not None:
            lens = lens - first_blocks * self._block_tokens
        widths = [_power_of_two(-(-n // self._block_tokens)) for n in lens.tolist()]
        rows = sorted(range(len(widths)), key=widths.__getitem__)
        for width, same in groupby(rows, key=widths.__getitem__):
            members = list(same)
            size = max(1, MAX_GATHERED_TOKENS // (width * self._block_tokens))
            for i in range(0, len(members), size):
                yield members[i : i + size], width

    def _group(
        self,
        batch: AttentionBatch,
        rows: list[int],
        m: int,
        first_blocks: Tensor | None,
        window: int | None,
    ) -> DecodeGroup:
        device = batch.block_table.device
        lens = batch.context_lens[rows]
        first = None if first_blocks is None else first_blocks[rows]
        if first is not None:
            lens -= first * self._block_tokens
        last = upload_one(lens - 1, device)
        mask = self._mask(last, m * self._block_tokens, window)[:, None, None]
        if len(rows) == batch.num_decodes:
            table = batch.block_table[: batch.num_decodes]
            return DecodeGroup(None, _blocks_from(table, first, m).flatten(), first, mask)
        index = upload_one(torch.tensor(rows), device)
        table = batch.block_table.index_select(0, index)
        return DecodeGroup(index, _blocks_from(table, first, m).flatten(), first, mask)

    def _span(self, batch: AttentionBatch, row: int, window: int | None) -> PrefillSpan:
        start, stop = batch.row_starts[row : row + 2].tolist()
        context_len = int(batch.context_lens[row])
        num_before = context_len - (stop - start)
        first_block = num_passed_blocks(num_before, self._block_tokens, window)
        num_before -= first_block * self._block_tokens  # those that are gathered
        tiles = []
        for first in range(start, stop, TILE_QUERIES):
            end = min(first + TILE_QUERIES, stop)
            device = batch.block_table.device
            last = torch.arange(num_before + first - start, num_before + end - start, device=device)
            ends, num_keys = None, num_before + end - start
            if batch.seen_ends is not None:
                seen = batch.seen_ends[first:end] - first_block * self._block_tokens
                ends, num_keys = upload_one(seen, device), int(seen.max())
            m = -(-num_keys // self._block_tokens)
            mask = self._mask(last, m * self._block_tokens, window, ends)
            tiles.append(Tile(first, end, m * self._block_tokens, mask))
        num_blocks = -(-context_len // self._block_tokens)
        blocks = batch.block_table[row, first_block:num_blocks].contiguous()
        return PrefillSpan(blocks, tiles, row, first_block)

    def _mask(
        self, last: Tensor, num_keys: int, window: int | None, ends: Tensor | None = None
    ) -> Tensor:
        """Return the mask [n, num_keys] for n queries at the positions `last` [n]: 0 for the keys
        before `ends` [n] and within the window, -inf for all others. Without `ends`, keys up to a
        query's position are seen."""
        keys = torch.arange(num_keys, device=last.device)
        hidden = keys > last[:, None] if ends is None else keys >= ends[:, None]
        if window is not None:
            hidden |= keys <= last[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=last.device)
        return mask.masked_fill_(hidden, float("-inf"))


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least n; n >= 1."""
    return 1 << (n - 1).bit_length()


def _blocks_from(table: Tensor, first: Tensor | None, m: int) -> Tensor:
    """Return m columns of each row of `table` [b, M], padded with the null block. Row i starts at
    column first[i] ([b], on the CPU), or at column 0 if `first` is None."""
    end = m if first is None else int(first.max()) + m
    table = table[:, :end] if end <= table.shape[1] else pad(table, (0, end - table.shape[1]))
    if first is None:
        return table
    start = upload_one(first, table.device)[:, None]
    return table.gather(1, start + torch.arange(m, device=table.device))


def _gathered(
    k_cache: Tensor, v_cache: Tensor, blocks: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of some blocks as numbers of `dtype`. Latent heads, which are
    both, are read once."""
    found = [k_cache] if v_cache is k_cache else [k_cache, v_cache]
    sides = [side.index_select(0, blocks) for side in found]
    if k_cache.dtype != dtype:
        sides = [numbers_of(side, dtype) for side in sides]
    return sides[0], sides[-1]


def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: DecodeGroup,
    attend: Attend,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention [b, H, D] of q [b, H, D] in the rows of a group. The G heads that share
    keys become G queries of one head, so that their keys are read once."""
    b, heads, head_dim = q.shape
    kv_heads, num_keys = k_cache.shape[2], group.mask.shape[-1]
    k, v = _gathered(k_cache, v_cache, group.blocks, q.dtype)
    k = k.view(b, num_keys, kv_heads, head_dim).transpose(1, 2)
    v = v.view(b, num_keys, kv_heads, head_dim).transpose(1, 2)
    shared_by = heads // kv_heads
    padding = -shared_by % QUERY_MULTIPLE
    grouped = pad(q.reshape(b, kv_heads, shared_by, head_dim), (0, 0, 0, padding))
    if sinks is not None:
        sinks = pad(sinks.view(kv_heads, shared_by, 1), (0, 0, 0, padding))
    out = attend(grouped, k, v, group.mask, sinks)
    return out[:, :, :shared_by].reshape(b, heads, head_dim)


def _prefill(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    span: PrefillSpan,
    attend: Attend,
    sinks: Tensor | None,
) -> None:
    """Write the attention of a span's tiles into their rows of `out`, [T, H, D] like q."""
    k, v = _gathered(k_cache, v_cache, span.blocks, q.dtype)
    k, v = (each.flatten(0, 1).transpose(0, 1)[None] for each in (k, v))  # [1, H_kv, N, D]
    sinks = None if sinks is None else sinks[:, None, None]
    is_latent = v_cache is k_cache
    if is_latent:  # the heads become rows of a batch that share one view of the latents
        k = v = k.expand(q.shape[1], -1, -1, -1)
    for tile in span.tiles:
        queries = q[tile.start : tile.stop].transpose(0, 1)
        queries = queries[:, None] if is_latent else queries[None]
        keys, values = k[:, :, : tile.num_keys], v[:, :, : tile.num_keys]
        answer = attend(queries, keys, values, tile.mask, sinks)
        out[tile.start : tile.stop] = (answer[:, 0] if is_latent else answer[0]).transpose(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    *,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    """Return the attention [b, H, n, D] of q [b, H, n, D] to k and v [b, H_kv, N, D], under a mask
    that is added to the scores [b, H, n, N]. Sinks are [H, n or 1, 1]."""
    is_grouped = q.shape[1] != k.shape[1]
    if soft_cap is None and sinks is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
    if is_grouped:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(2, 3)).float()
    if soft_cap is None:
        scores.mul_(scale).add_(mask)
    else:
        scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap).add_(mask)
    weights = softmax(scores, dim=-1) if sinks is None else _softmax_with(sinks, scores)
    return weights.to(v.dtype) @ v


def _softmax_with(sinks: Tensor, scores: Tensor) -> Tensor:
    """Return the weights of scores [b, H, n, N] float32, in their memory, with sinks [H, n or 1, 1]
    in the denominator."""
    peak = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = scores.sub_(peak).exp_()
    return weights.div_(weights.sum(-1, keepdim=True).add_((sinks - peak).exp_()))
