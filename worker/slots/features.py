"""Sampling features that a request can use beyond greedy decoding, one bit each.

A slot stores the bits of its request, and `Sampled.features` is the union of the bits of a step's
rows. A feature that no row of the step uses is skipped without examining any row.
"""

from __future__ import annotations

from protocol.engine.sampling import filter_order, listed_only, uses_mirostat
from protocol.worker.steps import SlotInit

DRAW = 1 << 0
BIAS = 1 << 1
REPETITION = 1 << 2
COUNTS = 1 << 3
ALLOWED = 1 << 4
BAD_WORDS = 1 << 5
MIN_TOKENS = 1 << 6
LOGPROBS = 1 << 7
PROMPT_LOGPROBS = 1 << 8
FILTERS = 1 << 9
DRY = 1 << 10
MIROSTAT = 1 << 11
ALL = (1 << 12) - 1


def features_of(init: SlotInit) -> int:
    """Return the bits of all features that the request may use at any of its tokens."""
    params = listed_only(init.params)
    used = {
        DRAW: params.temperature != 0,
        BIAS: params.logit_bias,
        REPETITION: params.repetition_penalty != 1,
        COUNTS: params.frequency_penalty != 0 or params.presence_penalty != 0,
        ALLOWED: params.allowed_token_ids,
        BAD_WORDS: params.bad_words,
        MIN_TOKENS: params.min_tokens != 0,
        LOGPROBS: params.logprobs is not None or params.logprob_token_ids,
        PROMPT_LOGPROBS: params.prompt_logprobs is not None,
        FILTERS: filter_order(params),
        DRY: params.dry_multiplier != 0 and params.dry_penalty_last_n != 0,
        MIROSTAT: uses_mirostat(params),
    }
    return sum(bit for bit, is_used in used.items() if is_used)
