"""Tokenizers of XLM-RoBERTa that are rebuilt from GGUF metadata encode like transformers' and
SentencePiece's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.gguf_tokenizers import TEXTS, assert_same, odd_texts, rebuilt
from tests.support.unigram import (
    SPECIAL,
    sentencepiece_ids,
    sentencepiece_model,
    unigram_metadata,
    xlmr_tokenizer,
)
from worker.errors import UnusableModel

MARKS = [*SPECIAL, "<mask>", " <mask> ", "<s", "\u2581", "\u2581the"]
ORDINARY = [
    "",
    "Hello, world!",
    "  Two spaces,  three   inside, and at the end  ",
    "tabs\tand\nnewlines\r\n\n  then indented",
    "Grüße aus Köln, naïve façade, Ωμέγα, русский текст, 日本語のテキスト",
    "\ufb01ligature \u2460 \uff21\uff22 \u00bd \u3000 wide",
    "🙂 unknown ⛵",
    "a\r\nb",
    "line\nline\n\n  indented",
    "the\u2581sea",
]


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    return unigram_metadata(sentencepiece_model())


def test_the_rebuilt_tokenizer_gives_the_tokens_of_transformers(metadata: dict[str, Any]) -> None:
    texts = [*TEXTS, *MARKS, *ORDINARY, *odd_texts(500, MARKS)]
    original = xlmr_tokenizer(sentencepiece_model())
    assert_same(rebuilt(metadata), original, texts)
    unknown = [text for text in texts if 3 in original.encode(text).ids]
    assert len(unknown) > 20


def test_a_pair_has_two_separators_between_its_texts(metadata: dict[str, Any]) -> None:
    original, ours = xlmr_tokenizer(sentencepiece_model()), rebuilt(metadata)
    one, other = ours.encode("the sea", "a harbour"), original.encode("the sea", "a harbour")
    assert (one.ids, one.type_ids) == (other.ids, other.type_ids)
    assert one.ids.count(2) == 3


def test_the_vocabulary_is_that_of_transformers(metadata: dict[str, Any]) -> None:
    ours = rebuilt(metadata)
    assert ours.get_vocab() == xlmr_tokenizer(sentencepiece_model()).get_vocab()
    assert ours.token_to_id("<mask>") == metadata["mask_token_id"]


def test_texts_are_not_split_into_the_padding_of_the_vocabulary() -> None:
    model = sentencepiece_model()
    values = unigram_metadata(model, num_padding=5)
    padding = [token for token in values["tokens"] if token.startswith("[PAD")]
    assert len(padding) == 6
    assert_same(rebuilt(values), xlmr_tokenizer(model), [*padding, *MARKS, *ORDINARY])


def test_padding_does_not_lower_the_score_of_unknown_characters() -> None:
    """One path has an unknown character, and the other many unlikely pieces."""
    pieces = {"▁": -1.0, "ab": -20.0, "c": -20.0, "d": -20.0, "bcd": -1.0}
    values: dict[str, Any] = {
        "model": "t5",
        "tokens": [*SPECIAL, *pieces, "[PAD9]", "[PAD10]"],
        "scores": [0.0] * 4 + list(pieces.values()) + [-10000.0] * 2,
        "token_type": [3, 3, 3, 2, *[1] * len(pieces), 5, 5],
    }
    tokens = rebuilt(values).encode("abcd", add_special_tokens=False).tokens
    assert tokens == ["▁", "a", "bcd"]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_dummy_prefix": False},
    {"remove_extra_whitespaces": False},
    {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
    {"normalization_rule_name": "identity"},
    {"normalization_rule_name": "nfkc_cf"},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_settings_of_sentencepiece_are_kept(options: dict[str, Any]) -> None:
    """Where the library of the gateway differs from SentencePiece, the texts are left out: it reads
    a literal mark and "\\r\\n" as one space, and splits at white space that no rule replaces."""
    model = sentencepiece_model(**options)
    ours = rebuilt(unigram_metadata(model))
    texts = [text for text in ORDINARY if "\u2581" not in text and "\r\n" not in text]
    if "normalization_rule_name" in options:
        texts = [text for text in texts if "\n" not in text and "\u3000" not in text]
    wanted = sentencepiece_ids(model, texts)
    for text, ids in zip(texts, wanted, strict=True):
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
    assert ours.decode(ours.encode("the sea").ids) == "the sea"


def test_characters_without_a_piece_become_bytes_if_there_are_pieces_of_bytes() -> None:
    model = sentencepiece_model(byte_fallback=True, character_coverage=0.98)
    ours = rebuilt(unigram_metadata(model))
    texts = ["a 🙂 b", "⛵", "\u0300x", *ORDINARY[:5]]
    assert len(ours.encode("⛵", add_special_tokens=False).ids) == 4
    for text, ids in zip(texts, sentencepiece_ids(model, texts), strict=True):
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
    assert ours.decode(ours.encode("a 🙂 b").ids) == "a 🙂 b"


def test_markers_are_left_out_if_the_file_says_so(metadata: dict[str, Any]) -> None:
    bare = rebuilt(metadata | {"add_bos_token": False, "add_eos_token": False})
    assert bare.encode("the").ids == rebuilt(metadata).encode("the").ids[1:-1]
    assert rebuilt(metadata | {"add_bos_token": False}).encode("the").ids[-1] == 2


def test_ids_that_older_files_lack_are_found_by_name(metadata: dict[str, Any]) -> None:
    kept = {key: value for key, value in metadata.items() if not key.endswith("_token_id")}
    assert_same(rebuilt(kept), rebuilt(metadata), ORDINARY)


def test_a_file_without_rules_has_no_normalizer(metadata: dict[str, Any]) -> None:
    del (bare := dict(metadata))["precompiled_charsmap"]
    assert json.loads(rebuilt(bare).to_str())["normalizer"] is None


def test_rules_in_signed_bytes_are_the_same(metadata: dict[str, Any]) -> None:
    rules = metadata["precompiled_charsmap"]
    signed = [byte - 256 if byte > 127 else byte for byte in rules]
    assert_same(rebuilt(metadata | {"precompiled_charsmap": signed}), rebuilt(metadata), ORDINARY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap is damaged: it is too short"),
        ({"precompiled_charsmap": [300]}, "precompiled_charsmap is not a list of bytes"),
        ({"precompiled_charsmap": "abc"}, "precompiled_charsmap is not a list of bytes"),
        ({"scores": [0.0]}, "scores is not a list of"),
        ({"scores": None}, "scores is not a list of"),
        ({"unknown_token_id": 100_000}, "unknown_token_id is missing, or outside"),
        ({"cls_token_id": 100_000}, "cls_token_id is missing, or outside"),
        ({"add_space_prefix": 1}, "add_space_prefix' is 1, not true or false"),
    ],
)
def test_a_unigram_tokenizer_that_cannot_be_rebuilt_is_refused_with_the_reason(
    metadata: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnusableModel, match=message):
        rebuilt(metadata | changes)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_refused(metadata: dict[str, Any], score: float) -> None:
    scores = [*metadata["scores"][:-1], score]
    with pytest.raises(UnusableModel, match="scores holds a number that is not finite"):
        rebuilt(metadata | {"scores": scores})


def test_a_piece_without_text_is_never_found(metadata: dict[str, Any]) -> None:
    tokens = list(metadata["tokens"])
    tokens[300] = ""
    ours: Tokenizer = rebuilt(metadata | {"tokens": tokens})
    assert 300 not in ours.encode("the sea and the harbour").ids
