"""A text is guessed as well from packed weights in bfloat16 as from the same numbers in float32."""

from __future__ import annotations

import math

import pytest
import torch

from tests.benchmarks.perplexity import EXACT, PROSE, of_logprobs, perplexity, tokens_of
from tests.support.kernels import native_kernels
from tests.support.model import smollm2_gguf
from tests.support.replica import load

NUM_TOKENS = 320
WITHIN = 0.01


def test_of_packed_weights_in_bfloat16_is_that_of_float32() -> None:
    model, native = smollm2_gguf(), native_kernels()
    exact = EXACT.load(model)
    tokens = tokens_of(exact, PROSE.read_text(encoding="utf-8"))[:NUM_TOKENS]
    wanted = perplexity(exact, tokens)
    packed = load(model, torch.bfloat16, kernels=native, weights="packed")
    assert perplexity(packed, tokens) == pytest.approx(wanted, rel=WITHIN)
    assert perplexity(packed, sorted(tokens)) > 2 * wanted, "it does not tell a text from noise"


def test_is_the_number_of_equally_likely_tokens_that_would_be_as_hard_to_guess() -> None:
    assert of_logprobs([math.log(1 / 7)] * 5) == pytest.approx(7)
