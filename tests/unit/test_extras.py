"""Each parameter that makes work sets its bit, and no other does."""

from __future__ import annotations

import pytest

from protocol.sampling import SamplingParams
from tests.support.plans import slot_init
from worker.sampling import features

NOTHING = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "max_tokens": 4}


@pytest.mark.parametrize(
    ("params", "bits"),
    [
        ({}, 0),
        ({"temperature": 0.1}, features.DRAW),
        ({"logit_bias": {1: 0.5}}, features.BIAS),
        ({"repetition_penalty": 1.1}, features.REPETITION),
        ({"frequency_penalty": -0.5}, features.COUNTS),
        ({"presence_penalty": 0.5}, features.COUNTS),
        ({"allowed_token_ids": [1]}, features.ALLOWED),
        ({"bad_words": [[1]]}, features.BAD_WORDS),
        ({"min_tokens": 1}, features.MIN_TOKENS),
        ({"logprobs": 0}, features.LOGPROBS),
        ({"logprob_token_ids": [1]}, features.LOGPROBS),
        ({"prompt_logprobs": 0}, features.PROMPT_LOGPROBS),
    ],
)
def test_what_a_request_asks_for_has_its_bit(params: dict[str, object], bits: int) -> None:
    asked = SamplingParams(**{**NOTHING, **params})  # type: ignore[arg-type]
    assert features.features_of(slot_init(0, [1], params=asked)) == bits
