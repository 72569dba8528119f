"""Tokenizers that are damaged, slow, or expand a text too much are found before they are used."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import tokenizers as hf
from tokenizers import models, pre_tokenizers

from gateway.text.tokenizer import Tokenizer
from gateway.text.trial import MAX_GROWTH, MAX_MAPPED_BYTES, check_growth, growth_of, run_trial
from protocol.wire.errors import InvalidRequest
from tests.support.scripted_engine import byte_tokenizer
from tests.support.tokenizers import (
    FAMILY_NAMES,
    byte_fallback_json,
    card_of,
    family_json,
    smollm2_tokenizer_json,
)


def replace(old: Any, new: str) -> dict[str, Any]:
    pattern = old if isinstance(old, dict) else {"String": old}
    return {"type": "Replace", "pattern": pattern, "content": new}


def all_of(*parts: Any, name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(parts)}


def charsmap(longest: int) -> str:
    return base64.b64encode(
        (8).to_bytes(4, "little") + b"\x01" * 8 + b"x" * longest + b"\0"
    ).decode()


@pytest.mark.parametrize(
    ("part", "growth"),
    [
        (None, 1),
        ({"type": "NFKC"}, 1),
        ({"type": "Prepend", "prepend": "▁"}, 2),
        (replace(" ", "▁"), 1),
        (replace("ab", "x" * 6), 3),
        (replace({"Regex": " {2,}"}, " "), 2),
        (all_of(replace("a", "bb"), replace("b", "aaa")), 6),
        (all_of(all_of(replace("a", "bb")), {"type": "NFC"}), 2),
        (all_of(replace("▁", "  "), {"type": "Fuse"}, name="decoders"), 2),
        ({"type": "Precompiled", "precompiled_charsmap": charsmap(MAX_MAPPED_BYTES)}, 1),
        ({"type": "Precompiled", "precompiled_charsmap": charsmap(MAX_MAPPED_BYTES + 1)}, "inf"),
        ({"type": "Precompiled", "precompiled_charsmap": "?"}, 1),
    ],
)
def test_how_much_one_character_can_become(part: Any, growth: float | str) -> None:
    assert growth_of(part) == float(growth)


@pytest.mark.parametrize(
    "part",
    [
        replace("a", "a" * 1_000_000),
        all_of(*[replace("a", "aa")] * 30),
        all_of(*[all_of(*[replace("a", "aa")] * 30)] * 3000),
        {"type": "Prepend", "prepend": "a" * 1_000_000},
        replace("", "a" * 1_000),
    ],
)
@pytest.mark.parametrize("name", ["normalizer", "decoder"])
def test_a_tokenizer_that_expands_text_too_much_is_refused(part: dict[str, Any], name: str) -> None:
    if name == "decoder":
        part = json.loads(json.dumps(part).replace("normalizers", "decoders"))
    with pytest.raises(
        ValueError, match=rf"{name} can expand one character to more than {MAX_GROWTH}"
    ):
        check_growth({name: part})


@pytest.mark.parametrize(
    "name", [*FAMILY_NAMES, "smollm2", "bytes", "strip", "metaspace", "wordpiece"]
)
def test_a_tokenizer_in_use_passes(name: str) -> None:
    if name == "smollm2":
        data = smollm2_tokenizer_json()
    elif name == "bytes":
        data = byte_tokenizer().to_str().encode()
    else:
        data = family_json(name) if name in FAMILY_NAMES else byte_fallback_json(decoder=name)
    run_trial(data.decode())


def words_without_unknown() -> hf.Tokenizer:
    inner = hf.Tokenizer(models.WordLevel(vocab={"Hello": 0}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return inner


def test_a_damaged_tokenizer_raises_an_error_with_the_reason() -> None:
    whole = byte_tokenizer().to_str()
    described = json.loads(whole)
    for damaged in (
        whole[:-100],
        "[]",
        json.dumps({**described, "model": {}}),
        json.dumps({**described, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}),
        words_without_unknown().to_str(),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            run_trial(damaged)


def splitting(pattern: str) -> str:
    """Return the JSON of a tokenizer that splits texts by a pattern."""
    described = json.loads(byte_tokenizer().to_str())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    described["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{**split, "invert": False}, described["pre_tokenizer"]],
    }
    return json.dumps(described)


@pytest.mark.parametrize(
    ("pattern", "said"), [(r"(?:a|aa)+\d", "retry-limit"), (r"\w*\w*\d", "too long for texts like")]
)
def test_a_pattern_that_tries_everything_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_trial(splitting(pattern))


def test_a_panic_of_the_tokenizer_is_an_error_of_the_request() -> None:
    tokenizer = Tokenizer(card_of(splitting(r"(?:q|qq)+\d").encode()))
    assert tokenizer.encode("Hello", False)
    with pytest.raises(InvalidRequest, match="retry-limit") as caught:
        tokenizer.encode("q" * 200 + "!", False, param="messages")
    assert caught.value.param == "messages"


def test_a_text_that_the_tokenizer_cannot_encode_is_refused_by_its_field() -> None:
    card = card_of(words_without_unknown().to_str().encode())
    with pytest.raises(InvalidRequest, match="cannot encode this text") as caught:
        Tokenizer(card).encode("Goodbye", False, param="messages")
    assert caught.value.param == "messages"
