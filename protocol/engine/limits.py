"""The limits of an engine, which it sends to its clients."""

from __future__ import annotations

import msgspec

from protocol.engine.kv_window import KVGroups


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of this engine, found at start.

    max_len      most tokens of prompt and answer together
    kv_lease_s   seconds that this engine keeps K/V for another engine; 0: it keeps none
    kv_window    K/V blocks further back than this many tokens are freed (kv_window.py). None: a
                 request keeps all of its blocks
    kv_groups    the K/V groups, if blocks of only some layers are freed; `kv_window` is then None
    max_adapters most LoRA adapters that can be loaded at the same time; 0: the engine has none
    state_bytes  bytes of a request's recurrent state; 0: the model has none. `num_checkpoints` can
                 hold one each
    image_rows   rows of images that the worker can keep, and so the most of one image; 0: this
                 engine computes no images
    """

    max_len: int
    max_slots: int
    block_tokens: int
    num_blocks: int
    token_budget: int
    prefix_cache: bool
    kv_lease_s: float = 0.0
    kv_window: int | None = None
    kv_groups: KVGroups | None = None
    max_adapters: int = 0
    state_bytes: int = 0
    num_checkpoints: int = 0
    image_rows: int = 0

    @property
    def max_whole_run(self) -> int:
        """The most positions that a step has for one request beside a token of each other one."""
        return self.token_budget + 1 - min(self.max_slots, self.token_budget)
