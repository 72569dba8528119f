"""Plain text never has a control token, decodes to itself, and is encoded as usual without one."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from gateway.text.plain_text import PlainTextEncoder
from tests.support.cpu_time import check_linear, cpu_s
from tests.support.examples import examples
from tests.support.tokenizers import FAMILY_NAMES, tokenizer_of

WORDS = [
    "def f(x):\n",
    "    return x",
    "<",
    "|",
    ">",
    "im",
    "_",
    "/",
    " ",
    "é",
    "日本",
    "\n\n",
    "<|",
    "|>",
]


@pytest.mark.parametrize("name", ["smollm2", *FAMILY_NAMES])
def test_text_of_markers_and_their_pieces_has_no_control_token(name: str) -> None:
    tokenizer = tokenizer_of(name)
    encoder = PlainTextEncoder(tokenizer)
    control = tokenizer.special_ids | tokenizer.eos_token_ids
    spelled = sorted(tokenizer.added_tokens.values())[:40]
    halves = [half for text in spelled for half in (text[:3], text[3:]) if half]

    @seed(1)
    @settings(max_examples=examples(60, 2000), deadline=None, database=None)
    @given(parts=st.lists(st.sampled_from([*WORDS, *spelled, *halves]), max_size=12))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        ids = encoder.encode(text)
        assert control.isdisjoint(ids)
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", text)
        if not any(marker in text for marker in tokenizer.added_tokens.values()):
            assert ids == tokenizer.encode(text, False)

    check()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_time_is_linear_however_often_a_marker_begins(name: str) -> None:
    encoder = PlainTextEncoder(tokenizer_of(name))
    spelled = sorted(tokenizer_of(name).added_tokens.values())
    for text in ("<", "<|", spelled[0], spelled[0][:-1]):

        def seconds(size: int, text: str = text) -> float:
            repeated = text * (size // len(text.encode()))
            return cpu_s(lambda: encoder.encode(repeated))

        check_linear(seconds, 50_000)
