"""What requests ask for beyond the likeliest token, one bit each.

A slot keeps its request's bits, a step the union of its rows' (`Sampled.extras`): what nobody in a
step asks for is passed by without a look at any row.
"""

from __future__ import annotations

from protocol.steps import SlotInit

DRAW = 1 << 0
BIAS = 1 << 1
REPETITION = 1 << 2
COUNTS = 1 << 3
ALLOWED = 1 << 4
BAD_WORDS = 1 << 5
LATER_END = 1 << 6
LOGPROBS = 1 << 7
PROMPT_LOGPROBS = 1 << 8
EVERYTHING = (1 << 9) - 1


def features_of(init: SlotInit) -> int:
    """All that such a request may ask for at any of its tokens."""
    params = init.params
    asked = {
        DRAW: params.temperature != 0,
        BIAS: params.logit_bias,
        REPETITION: params.repetition_penalty != 1,
        COUNTS: params.frequency_penalty != 0 or params.presence_penalty != 0,
        ALLOWED: params.allowed_token_ids,
        BAD_WORDS: params.bad_words,
        LATER_END: params.min_tokens != 0,
        LOGPROBS: params.logprobs is not None or params.logprob_token_ids,
        PROMPT_LOGPROBS: params.prompt_logprobs is not None,
    }
    return sum(bit for bit, is_asked in asked.items() if is_asked)
