"""Lines wrapped at the width of a terminal, however the text is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.chat.markdown import MarkdownPrinter
from tools.chat.reasoning import ReasoningPrinter
from tools.chat.wrap import MIN_COLUMNS, LineWrapper
from tools.terminal import char_width

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
PARTS = re.compile(rf"{ESCAPES.pattern}|.")
"""An escape sequence, which the printers never cut, or a character."""
PIECES = ["a", "word", " ", "  ", "漢字", "é", "👍", "\x1b[1m", "\x1b[22m", "x" * 30, ",", "\u0301"]


def wrapped(*pieces: str, columns: int = 20, indent: str = "") -> list[str]:
    """Return the lines into which one line is broken."""
    wrapper = LineWrapper(lambda: columns)
    wrapper.indent(indent)
    return ("".join(map(wrapper.push, pieces)) + wrapper.finish()).split("\n")


def markdown(*pieces: str) -> str:
    printer = MarkdownPrinter(lambda: 20)
    return ESCAPES.sub("", "".join(map(printer.push, pieces)) + printer.finish())


def width(text: str) -> int:
    return sum(map(char_width, ESCAPES.sub("", text)))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four five", ["one two three four", "five"]),
        ("exactly twenty chars", ["exactly twenty chars"]),
        ("exactly twenty chars more", ["exactly twenty chars", "more"]),
        ("a " + "b" * 45, ["a", "b" * 20, "b" * 20, "b" * 5]),
        ("    indented", ["    indented"]),
        ("trailing  ", ["trailing  "]),
        ("漢字" * 6, ["漢字" * 5, "漢字"]),
        ("a漢" + "字" * 9, ["a漢" + "字" * 8, "字"]),
        ("e\u0301" * 20 + " f", ["e\u0301" * 20, "f"]),
        ("\x1b[1mone two three\x1b[22m four five", ["\x1b[1mone two three\x1b[22m four", "five"]),
        ("", [""]),
    ],
)
def test_a_line_is_broken_between_words_or_wide_characters(text: str, lines: list[str]) -> None:
    assert wrapped(text) == lines
    assert wrapped(*PARTS.findall(text)) == lines


def test_the_lines_below_have_the_indent() -> None:
    found = wrapped("• one two three four five six", indent="  ")
    assert found == ["• one two three four", "  five six"]


@given(st.lists(st.sampled_from(PIECES)).flatmap(lambda pieces: st.tuples(*map(st.just, pieces))))
def test_no_line_is_too_wide_and_only_spaces_are_lost(pieces: tuple[str, ...]) -> None:
    lines = wrapped(*pieces)
    assert all(width(line.rstrip()) <= 20 for line in lines)
    text = "".join(pieces)
    assert wrapped(text) == wrapped(*PARTS.findall(text)) == lines
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_a_complete_word_is_not_held_back() -> None:
    wrapper = LineWrapper(lambda: 20)
    assert [wrapper.push(text) for text in ("on", "e ", "two", " ")] == ["", "one", "", " two"]


def test_the_width_is_read_again_at_each_line() -> None:
    widths: Iterator[int] = iter([40, 20, 40])
    wrapper = LineWrapper(lambda: next(widths))
    text = "one two three four five"
    assert wrapper.push(text) + wrapper.finish() == text
    assert wrapper.push(text) + wrapper.finish() == "one two three four\nfive"


@pytest.mark.parametrize("columns", [0, MIN_COLUMNS - 1])
def test_a_terminal_without_a_useful_width_breaks_lines_itself(columns: int) -> None:
    assert wrapped("one two three four five", columns=columns) == ["one two three four five"]


def test_code_is_not_wrapped_and_items_are_indented() -> None:
    code = "```\nfor number in range(1000): print(number)\n```\n"
    assert markdown(code) == code
    assert markdown("- one two three four five") == "• one two three four\n  five"
    assert markdown("1. one two three four five") == "1. one two three\n   four five"
    assert markdown("  10)  one two three four") == "  10)  one two three\n       four"
    assert markdown("1.5 is one and a half, 7") == "1.5 is one and a\nhalf, 7"
    assert markdown("2024. ", "Then it was. It was") == "2024. Then it was.\n      It was"
    assert markdown("> one two three four five") == "│ one two three four\n│ five"
    text = "some **words that are strong** here"
    assert markdown(text) == markdown(*text) == "some words that are\nstrong here"


def test_reasoning_is_wrapped() -> None:
    printer = ReasoningPrinter(lambda: 20)
    shown = "".join(map(printer.push, "one two three four five\nsix")) + printer.finish()
    assert ESCAPES.sub("", shown) == "one two three four\nfive\nsix\n\n"
