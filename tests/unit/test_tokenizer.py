"""The shared tokenizer: the bytes of every id, and the refusal of texts that are too long."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import tokenizers as hf

from gateway.api.openai.parameters import bad_sequences
from gateway.text.tokenizer import INLINE_BYTES, Tokenizer
from protocol.wire.errors import ContextTooLong, InvalidRequest
from tests.support.scripted_engine import byte_tokenizer
from tests.support.tokenizers import (
    FAMILY_NAMES,
    byte_fallback_json,
    card_of,
    smollm2_tokenizer_json,
    tokenizer_of,
)


def smollm2() -> Tokenizer:
    return tokenizer_of("smollm2")


def test_a_real_text_is_encoded_and_decoded_back() -> None:
    ids = smollm2().encode("Hello world 123", False)
    assert ids == [19556, 905, 216, 33, 34, 35]
    assert smollm2().decode(ids) == "Hello world 123"


def test_only_long_texts_are_encoded_by_offload() -> None:
    calls: list[int] = []

    def offload(work: Callable[[], list[int]]) -> list[int]:
        calls.append(1)
        return work()

    short, long = "a b " * 100, "a b 👍 " * INLINE_BYTES
    tok = Tokenizer(card_of(smollm2_tokenizer_json(), context_tokens=100_000))
    assert tok.encode(short, False, offload=offload) == tok.encode(short, False)
    assert not calls
    assert tok.encode(long, False, offload=offload) == tok.encode(long, False)
    assert calls == [1]


def test_a_text_that_is_too_long_is_refused_unread_with_the_numbers() -> None:
    tok = Tokenizer(card_of(smollm2_tokenizer_json(), context_tokens=8), max_text_bytes=9)
    assert tok.encode("é" * 4, False)
    words = r"length is 8 tokens\. However, .*: about 9 tokens > 8 maximum \(messages is 10 bytes"
    with pytest.raises(ContextTooLong, match=words) as caught:
        tok.encode("é" * 5, False, param="messages")
    assert caught.value.param == "messages"


def test_a_text_whose_token_the_model_does_not_have_is_refused_by_name() -> None:
    inner = byte_tokenizer(["<new>"])
    tok = Tokenizer(card_of(inner.to_str().encode(), vocab_size=259))
    assert tok.encode("ok", False) == list(b"ok")
    words = r"messages: the text '<new>' is token 259, which this model's vocabulary of 259 tokens"
    with pytest.raises(InvalidRequest, match=words) as caught:
        tok.encode("a <new> b", False, param="messages")
    assert caught.value.param == "messages"


def test_a_bad_word_whose_token_the_model_does_not_have_is_refused_by_its_place() -> None:
    inner = byte_tokenizer(["<new>"])
    tok = Tokenizer(card_of(inner.to_str().encode(), vocab_size=259))
    with pytest.raises(InvalidRequest, match="token 259") as caught:
        bad_sequences(["ok", "<new>"], tok)
    assert caught.value.param == "bad_words[1]"


def test_half_a_surrogate_pair_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair") as caught:
        smollm2().encode("a\ud83d", False, param="prompt[1]")
    assert caught.value.param == "prompt[1]"


def test_bytes_that_are_no_tokenizer_are_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="tokenizer cannot be read"):
        Tokenizer(card_of(smollm2_tokenizer_json()).__replace__(tokenizer=b"{}"))


def test_truncation_and_padding_of_training_are_gone() -> None:
    described = json.loads(smollm2_tokenizer_json())
    described["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    described["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    tok = Tokenizer(card_of(json.dumps(described).encode()))
    text = "one two three four five six"
    assert tok.encode(text, True) == smollm2().encode(text, True)


def test_special_ids_and_spellings_come_from_the_vocabulary() -> None:
    tok = smollm2()
    assert tok.token_id("<|im_end|>") == 2
    assert 2 in tok.special_ids
    assert tok.token_id("no such token") is None
    assert tok.decode([2, 19556]) == "Hello"
    assert tok.decode([2, 19556], skip_special_tokens=False) == "<|im_end|>Hello"


@pytest.mark.parametrize("name", ["smollm2", *FAMILY_NAMES])
def test_the_bytes_of_single_tokens_make_up_the_text_exactly(name: str) -> None:
    tok = tokenizer_of(name)
    for text in ("naïve 👩🏽‍🚀 語 \u0301", "\x00\x7f\xa0\xad ĠĊ", " a  b\t\n"):
        ids = tok.encode(text, False)
        spelled = b"".join(tok.token_bytes(i) for i in ids)
        assert spelled.decode() == tok.decode(ids, skip_special_tokens=False)


def test_each_letter_of_the_byte_alphabet_is_one_byte_of_its_own() -> None:
    inner = hf.Tokenizer.from_buffer(smollm2_tokenizer_json())
    ids = [inner.token_to_id(letter) for letter in hf.pre_tokenizers.ByteLevel.alphabet()]
    single = [smollm2().token_bytes(i) for i in ids if i is not None]
    assert len(single) > 200
    assert {len(data) for data in single} == {1}
    assert len(set(single)) == len(single)


def test_tokens_of_a_sentencepiece_vocabulary_keep_their_blank_and_their_byte() -> None:
    tok = Tokenizer(card_of(byte_fallback_json()))
    assert tok.token_bytes(tok.token_id("▁Hello") or 0) == b" Hello"
    assert tok.token_bytes(tok.token_id("<0xE2>") or 0) == b"\xe2"
    assert tok.token_text(tok.token_id("<0xE2>") or 0) == "\ufffd"
    assert tok.token_bytes(10**6) == b""


def test_tokens_of_a_decoder_that_is_not_understood_are_spelled_by_the_library() -> None:
    tok = Tokenizer(card_of(byte_fallback_json(decoder="wordpiece")))
    assert tok.token_bytes(tok.token_id("語") or 0) == "語".encode()
