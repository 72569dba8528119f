"""Facts about a model, known before a server starts.

`python -P -m worker.startup.preflight` writes them as JSON for `tidegate serve`, `tidegate
engine` and `tidegate doctor`. Nothing of it is written back into a config.
"""

from __future__ import annotations

import msgspec

from protocol.model_card import ModelCard

GIB = 1 << 30


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the memory of one worker, by the headers of its files; no weight has been read.

    context_tokens   the model's own limit; window: the attention window that makes it this short
    max_len          tokens that one request may have
    weights_bytes    in the form that they have after loading, draft model included
    kv_bytes         of the K/V cache
    work_bytes       of the processes and of a step
    tier_bytes       of the host memory for blocks that the cache has dropped
    free_bytes       of the device, or of this container
    expanded         quantised types of the files whose weights are expanded to `dtype`
    """

    name: str
    architecture: str
    device: str
    dtype: str
    context_tokens: int
    max_len: int
    weights_bytes: int
    kv_bytes: int
    work_bytes: int
    free_bytes: int
    tier_bytes: int = 0
    window: int | None = None
    expanded: list[str] = []


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """plans: one for each worker; none if there is an `error`, whose `remedy` says what to do.

    is_memory   there is too little of it; otherwise the model or an option is at fault
    card        what the files of the first worker's model say of text; None if there is an `error`
    """

    plans: list[ModelPlan] = []
    error: str = ""
    remedy: str = ""
    is_memory: bool = False
    card: ModelCard | None = None
