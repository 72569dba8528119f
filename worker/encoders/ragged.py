"""A step's inputs side by side, without padding, and the attention inside each of them.

All tokens of a step are one matrix, so linear layers waste nothing on padding. Only attention pads:
the inputs are sorted by length and cut into groups of similar lengths, and each group is one call
of scaled_dot_product_attention (SDPA). There is no Python loop over inputs.

Legend: T tokens in the step, N inputs in the step, H heads, D head dim; n inputs of a group, L
tokens of its longest input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.device.staging import upload
from worker.encoders.position_bias import bias_tile
from worker.encoders.spec import MAX_GROUP_TOKENS, QUERY_TILE

Ints = NDArray[np.int64]
LENGTH_RATIO, LENGTH_SLACK = 1.25, 8
"""The longest input of a group has at most LENGTH_RATIO times as many tokens as the shortest one,
plus LENGTH_SLACK. So the padding of attention is bounded, and so is the number of groups."""


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Inputs of similar lengths, whose tokens are next to each other in the step.

    first, end   the tokens of the group
    count        number of inputs (n)
    longest      tokens of the longest input (L)
    gather       [n * L] int64: index among the group's tokens of each padded place; None: all
                 inputs have the same length
    scatter      [end - first] int64: padded place of each token; None as above
    is_token     [n, L] bool: whether a padded place is a token; None as above
    """

    first: int
    end: int
    count: int
    longest: int
    gather: Tensor | None = None
    scatter: Tensor | None = None
    is_token: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The inputs of a step, sorted by length.

    token_ids, positions   [T] int64
    types                  [T] int64: token types; None: all 0
    input_of_token         [T] int64: number of each token's input, in the sorted order
    starts, ends           [N] int64: first token of each input, and the one after its last
    restore                [N] int64: the sorted place of each input, in the order of the plan
    """

    token_ids: Tensor
    positions: Tensor
    types: Tensor | None
    input_of_token: Tensor
    starts: Tensor
    ends: Tensor
    restore: Tensor
    groups: list[InputGroup]
    #: [N] tokens of each input, on the host.
    sizes: Ints


def group_ends(lengths: Ints) -> Iterator[int]:
    """Yield the index after the last input of each group. `lengths` [N] ascend."""
    first = 0
    for index in range(1, len(lengths)):
        longest = LENGTH_RATIO * lengths[first] + LENGTH_SLACK
        padded = (index + 1 - first) * lengths[index]
        if lengths[index] > longest or padded > MAX_GROUP_TOKENS:
            yield index
            first = index
    yield len(lengths)


def ragged_batch(
    tokens: Ints, lengths: Ints, splits: Ints | None, device: torch.device
) -> RaggedBatch:
    """Return the batch of inputs with these tokens [T], lengths [N] and splits [N]
    (`EncodeInputs`)."""
    order = np.argsort(lengths, kind="stable")
    restore = np.empty_like(order)
    restore[order] = np.arange(len(order))
    sizes = lengths[order]
    ends = sizes.cumsum()
    starts = ends - sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.arange(len(tokens)) - starts[owner]
    before = (lengths.cumsum() - lengths)[order]
    ids = tokens[before[owner] + positions]
    arrays = [ids, positions, owner, starts, ends, restore]
    if splits is not None:
        arrays.append((positions >= splits[order][owner]).astype(np.int64))
    token_ids, places, owners, first, after, restored, *types = upload(arrays, device)
    return RaggedBatch(
        token_ids=token_ids,
        positions=places,
        types=types[0] if types else None,
        input_of_token=owners,
        starts=first,
        ends=after,
        restore=restored,
        groups=[*_groups(sizes, device)],
        sizes=sizes,
    )


def _groups(sizes: Ints, device: torch.device) -> Iterator[InputGroup]:
    first = token = 0
    for end in group_ends(sizes):
        own = sizes[first:end]
        count, longest, total = end - first, int(own[-1]), int(own.sum())
        if own[0] == longest:
            yield InputGroup(token, token + total, count, longest)
        else:
            place = np.arange(longest)
            is_token = place < own[:, None]
            begins = (own.cumsum() - own)[:, None]
            gather = np.where(is_token, begins + place, begins).reshape(-1)
            scatter = np.flatnonzero(is_token.reshape(-1))
            padded, places = upload([gather, scatter], device)
            mask = torch.from_numpy(is_token).to(device)
            yield InputGroup(token, token + total, count, longest, padded, places, mask)
        first, token = end, token + total


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    *,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the attention [T, H, D] of q, k, v [T, H, D] inside each input. Every token sees the
    tokens on both sides.

    window   a token sees the tokens that are at most this many positions away; None: all
    bias     [H, 2 * C - 1]: what is added to scores, by offset (position_bias.py); None: nothing
    """
    seen = torch.empty_like(q)
    for group in batch.groups:
        rows = [each[group.first : group.end] for each in (q, k, v)]
        if group.gather is not None:
            rows = [each.index_select(0, group.gather) for each in rows]
        queries, keys, values = (
            each.reshape(group.count, group.longest, *each.shape[1:]).transpose(1, 2)
            for each in rows
        )
        if window is None and bias is None:
            mask = None if group.is_token is None else group.is_token[:, None, None]
            found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        else:
            found = _attend_tiles(queries, keys, values, group, window, bias)
        flat = found.transpose(1, 2).reshape(group.count * group.longest, *q.shape[1:])
        seen[group.first : group.end] = (
            flat if group.scatter is None else flat.index_select(0, group.scatter)
        )
    return seen


def _attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, group: InputGroup, window: int | None, table: Tensor | None
) -> Tensor:
    """Return the attention [n, H, L, D] of a group with a window or a bias, some queries at a
    time."""
    places = torch.arange(group.longest, device=q.device)
    tiles = []
    for first in range(0, group.longest, QUERY_TILE):
        end = min(first + QUERY_TILE, group.longest)
        low, high = 0, group.longest
        if window is not None:
            low, high = max(0, first - window), min(high, end + window)
        distance = (places[first:end, None] - places[None, low:high]).abs()
        bias: Tensor | None = None
        if table is not None:
            bias = bias_tile(table, range(first, end), range(low, high))[None]
        hidden = torch.zeros((), dtype=torch.bool, device=q.device)
        if window is not None:
            # A padded query must see a key, because a softmax over nothing is not a number.
            hidden = (distance > window)[None, None]
        if group.is_token is not None:
            hidden = hidden | ~group.is_token[:, None, None, low:high]
            hidden = hidden & (distance > 0)
        mask = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
        mask = mask.masked_fill(hidden, -torch.inf).expand(
            group.count, q.shape[1], end - first, high - low
        )
        keys, values = k[:, :, low:high], v[:, :, low:high]
        tiles.append(scaled_dot_product_attention(q[:, :, first:end], keys, values, attn_mask=mask))
    return torch.cat(tiles, dim=2)
