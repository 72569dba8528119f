"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math

import msgspec

from gateway.text.logprobs import (
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    json_logprob,
    prompt_token_logprobs,
)
from gateway.text.tokenizer import Tokenizer
from protocol.engine.logprobs import TokenLogprobs
from tests.support.tokenizers import tokenizer_of


def tokenizer() -> Tokenizer:
    return tokenizer_of("smollm2")


def test_the_chat_shape_names_tokens_and_their_exact_bytes() -> None:
    hello, half = 19556, tokenizer().encode("語", False)[0]
    entry = TokenLogprobs(hello, -0.5, 1, [hello, half], [-0.5, -math.inf])
    (item,) = chat_logprobs(tokenizer(), [entry], num_top=2)
    half_bytes = tokenizer().token_bytes(half)
    assert msgspec.to_builtins(item) == {
        "token": "Hello",
        "logprob": -0.5,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": list(half_bytes)},
        ],
    }
    assert chat_logprobs(tokenizer(), [entry], num_top=0)[0].top_logprobs == []


def test_the_completion_shape_gives_offsets_in_the_text_that_is_sent() -> None:
    text = "Hé 語👍 end"
    ids = tokenizer().encode(text, False)
    entries = [None, *(TokenLogprobs(i, -1.0, 1, [i], [-1.0]) for i in ids[1:])]
    offsets = TextOffsets(tokenizer().detokenizer(), start=100)
    shape = completion_logprobs(tokenizer(), ids, entries, offsets=offsets, num_top=1)
    assert shape.token_logprobs == [None] + [-1.0] * (len(ids) - 1)
    assert shape.top_logprobs[0] is None
    assert shape.top_logprobs[-1] == {" end": -1.0}
    assert shape.text_offset[0] == 100
    assert shape.text_offset[-1] == 100 + text.index(" end")
    assert shape.text_offset == sorted(shape.text_offset)


def test_parts_of_a_character_stay_different_keys() -> None:
    parts = tokenizer().encode("語", False)
    assert len(parts) > 1
    entry = TokenLogprobs(parts[0], -1.0, 1, parts, [-1.0] * len(parts))
    offsets = TextOffsets(tokenizer().detokenizer())
    shape = completion_logprobs(
        tokenizer(), parts[:1], [entry], offsets=offsets, num_top=len(parts)
    )
    (tops,) = shape.top_logprobs
    assert tops is not None
    assert len(tops) == len(set(parts))
    assert shape.tokens[0].startswith("bytes:\\x")


def test_the_chosen_token_is_among_the_top_ones_of_a_completion() -> None:
    entry = TokenLogprobs(19556, -7.0, 900, [905], [-0.1])
    offsets = TextOffsets(tokenizer().detokenizer())
    shape = completion_logprobs(tokenizer(), [19556], [entry], offsets=offsets, num_top=1)
    assert shape.top_logprobs == [{" world": -0.1, "Hello": -7.0}]
    shape = completion_logprobs(tokenizer(), [19556], [entry], offsets=offsets, num_top=0)
    assert shape.top_logprobs == [{"Hello": -7.0}]


def test_a_prompt_has_no_more_alternatives_than_were_asked_for() -> None:
    entry = TokenLogprobs(19556, -7.0, 900, [905, 906], [-0.1, -0.2])
    first, second = prompt_token_logprobs(tokenizer(), [entry], 1)
    assert first is None
    assert {token: chance["rank"] for token, chance in second.items()} == {905: 1, 19556: 900}


def test_json_never_sees_infinity() -> None:
    assert [json_logprob(x) for x in (-math.inf, math.nan, -1.5)] == [-9999.0, -9999.0, -1.5]
