"""Interface of attention: a step's input, and what every backend implements.

Legend: T tokens in the step, R rows (requests) in the step, M most blocks of any row, B blocks in
the cache, H query heads, H_kv key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where this step's tokens stand in their requests and in the cache.

    positions     [T] int64        position of each token in its request
    slot_mapping  [T] int64        where its K/V is written: block * block_tokens + offset
    row_starts    [R + 1] int64    on the CPU; row r is tokens [row_starts[r], row_starts[r + 1])
    context_lens  [R] int64        on the CPU; tokens that the row's *last* token sees, with itself
    block_table   [R, M] int64     blocks of each row in order, padded with 0, the null block
    num_decodes                    rows of exactly one token; they come first

    A row's tokens are the last ones of its context, so its i-th of n tokens sees
    context_len - n + i + 1 tokens.
    """

    positions: Tensor
    slot_mapping: Tensor
    row_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    num_decodes: int


class Attention(Protocol):
    """A backend, stateless between steps. What depends on the step but on no layer is its plan."""

    def plan(self, batch: AttentionBatch) -> Any:
        """Once per step: the indexes and masks that all layers share."""
        ...

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any) -> Tensor:
        """One layer: q [T, H, D]; k_cache, v_cache [B, block_tokens, H_kv, D] -> [T, H, D].

        The step's own keys and values are in the cache already. Scores are scaled by D ** -0.5.
        Query head h reads key/value head h // (H / H_kv).
        """
        ...
