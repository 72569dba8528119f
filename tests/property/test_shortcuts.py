"""A parser's shortcuts give the same events and the same state as parsing without them."""

from __future__ import annotations

import random
from typing import cast

import pytest

from gateway.formats.lexicon import Lexicon, MarkerToken, Piece
from gateway.formats.parser import FormatParser
from gateway.formats.registry import format_of
from gateway.formats.standard import StandardParser

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CALL = '\n{"name": "note", "arguments": {"text": "'
WORDS = (
    *(
        "word ",
        "two words",
        " ",
        "\n",
        "\n\n",
        "é",
        "語",
        "<",
        "</",
        "<thi",
        "nk>",
        "{",
        "}",
        "[",
        "]",
    ),
    *('"', '\\"', "\\", "\\n", "\\u00e9", "\\u00", '": "', '", "', '"}', '"}}', '"}}\n', ":", ","),
    *("12", "true", "nul", "\x00", "\x1f", "\t", "—"),
)
FORMATS = (
    ("hermes", "qwen3"),
    ("hermes", None),
    ("llama3_json", "deepseek_r1"),
    ("jamba", "qwen3"),
    (None, "qwen3"),
    ("qwen3_coder", "qwen3"),
)


def a_text(chance: random.Random) -> list[str]:
    """Return the pieces of a random answer, well-formed or not."""
    pieces = []
    for _ in range(chance.randrange(1, 60)):
        pieces.append(
            chance.choices((*WORDS, *MARKERS, CALL), (*[1] * len(WORDS), 2, 2, 2, 2, 4))[0]
        )
        if pieces[-1] == CALL:
            pieces += chance.choices(WORDS[:6], k=chance.randrange(6))
    return pieces


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "spelt"])
@pytest.mark.parametrize("names", FORMATS, ids=lambda names: "-".join(map(str, names)))
def test_shortcuts_change_neither_events_nor_state(
    names: tuple[str | None, str | None], has_tokens: bool
) -> None:
    shortcuts = 0
    for seed in range(150):
        chance = random.Random(seed)
        lexicon = Lexicon(dict(enumerate(MARKERS)) if has_tokens else {})
        quick, plain = (
            cast(StandardParser, format_of(*names).parser(lexicon, new_id=lambda: "id"))
            for _ in range(2)
        )
        for text in a_text(chance):
            piece: Piece = text
            if has_tokens and text in MARKERS:
                piece = MarkerToken(MARKERS.index(text), text)
            else:
                shortcuts += quick.fast_event(text) is not None
            assert quick.push(piece) == FormatParser.push(plain, piece)
            assert quick.state() == plain.state()
            assert quick.builder.state() == plain.builder.state()
        assert quick.finish() == plain.finish()
    assert shortcuts > 100


def test_content_reasoning_and_argument_strings_have_a_shortcut() -> None:
    machine = cast(StandardParser, format_of("hermes", "qwen3").parser(Lexicon()))
    told = []
    for text in ("<think>", "Hm", ".", "</think>", "Well", " then", "<tool_call>", CALL, "a", "b"):
        told.append(machine.fast_event(text) is not None)
        machine.push(text)
    assert told == [False, False, True, False, False, True, False, False, True, True]


def test_the_shortcut_for_arguments_after_a_name_changes_no_events() -> None:
    quick, plain = (
        cast(StandardParser, format_of("kimi_k2", None).parser(Lexicon(), new_id=lambda: "id"))
        for _ in range(2)
    )
    head = '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": "'
    shortcuts = 0
    for text in (head, "b", " c", "\\", "n", "d", "\x01", "e", "<", "f", '"', ", ", "g", "h", '"}'):
        shortcuts += quick.fast_event(text) is not None
        assert quick.push(text) == FormatParser.push(plain, text)
        assert quick.state() == plain.state()
        assert quick.builder.state() == plain.builder.state()
    assert shortcuts == 6
