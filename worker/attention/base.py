"""The interface of attention backends, and the input that they receive for a step.

Legend: T tokens in the step, R rows (requests) in the step, M most blocks of any row, B blocks in
the cache, H query heads, H_kv key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The positions of a step's tokens in their requests and in the cache.

    A row's tokens are the last tokens of its context. So token i of a row of n tokens sees
    context_len - n + i + 1 tokens, if there are no `seen_ends`.
    """

    #: [T] int64: position of each token in its request.
    positions: Tensor
    #: [T] int64: where the K/V of each token is written, as block * block_tokens + offset.
    slot_mapping: Tensor
    #: [R + 1] int64, on the CPU. Row r has the tokens [row_starts[r], row_starts[r + 1]).
    row_starts: Tensor
    #: [R] int64, on the CPU: number of tokens that the last token of the row sees, with itself.
    context_lens: Tensor
    #: [R, M] int64, int32 on a GPU: the blocks of each row in order, padded with 0, which is the
    #: null block.
    block_table: Tensor
    #: Number of rows with exactly one token. They precede all other rows.
    num_decodes: int
    #: The same step for the other blocks of a block table's columns (KVGroups). These batches
    #: differ only in slot mapping and block table. The slot mappings of all batches, this one
    #: first, are slices of one tensor; so are the block tables.
    further: tuple[AttentionBatch, ...] = ()
    #: On a GPU, [R + 1] and [R] int32: `row_starts` and `context_lens` in its memory. None on the
    #: CPU.
    device_row_starts: Tensor | None = None
    device_context_lens: Tensor | None = None
    #: [AXES, T] int64: the rotary positions (slots/rope_positions.py). None: they are `positions`
    #: in all axes. A draft model without axes ignores them.
    rope_positions: Tensor | None = None
    #: [T] int64, on the CPU: the position before which a token sees others, in layers with
    #: `AttentionSpec.sees_whole_runs`. It follows the last token of its image, or the token itself.
    #: None: no token sees later ones.
    seen_ends: Tensor | None = None

    def with_seen_ends(self, ends: Tensor | None) -> AttentionBatch:
        """Return the batch with other `seen_ends`, also in `further`."""
        further = tuple(replace(each, seen_ends=ends) for each in self.further)
        return replace(self, seen_ends=ends, further=further)

    def for_entry(self, entry: int) -> AttentionBatch:
        """Return the batch for layers whose K/V is in entry `entry` of a block table's columns
        (`LayerPlace.entry`): this one, or one of `further`."""
        return self if entry == 0 else self.further[entry - 1]


class Attention(Protocol):
    """An attention backend. It keeps no state between steps.

    is_capturable   whether steps of rows with one token launch the same work, whatever the rows
                    contain, so that a graph of the GPU can repeat it
    """

    is_capturable: bool

    def plan(self, batch: AttentionBatch, window: int | None = None, like: Any = None) -> Any:
        """Return the indexes and masks of a step. All layers that have this window and use the
        block table of `batch` can share them.

        window   a token sees this many last tokens, itself included; None: all
        like     a plan of the same step and window, made for layers with another block table; the
                 result may reuse its parts. Its batch differs only in slot mapping and block table.
                 None: there is no such plan
        """
        ...

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Any,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return one layer's attention [T, H, D] for q [T, H, D] and its caches
        (`PagedCache.layer`), which hold the step's own keys and values already.

        scale      factor of the scores; None: D ** -0.5
        soft_cap   scores become `soft_cap * tanh(score / soft_cap)`
        sinks      [H] float32: a score of each head that joins the softmax and has no value, so
                   that the weights of the keys add up to less than 1; None: no sinks

        Query head h reads key/value head h // (H / H_kv).
        """
        ...
