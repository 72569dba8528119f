"""Markdown on a terminal: what is shown, however the text is cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cuts import all_cuts
from tools.chat.markdown import MAX_SPAN, MarkdownPrinter
from tools.terminal import safe_text

MARKS = {
    "\x1b[1m": "<b>",
    "\x1b[22m": "</b>",
    "\x1b[3m": "<i>",
    "\x1b[23m": "</i>",
    "\x1b[36m": "<c>",
    "\x1b[39m": "</c>",
    "\x1b[2m": "<f>",
    "\x1b[1;4m": "<h>",
    "\x1b[22;24m": "</h>",
    "\x1b[0m": "</>",
}
PIECES = [
    "*",
    "**",
    "_",
    "`",
    "```",
    "\n",
    " ",
    "a",
    "b c",
    "- ",
    "# ",
    "> ",
    "\\",
    "~~~",
    "---",
    "$",
    "\\(",
    "\\)",
]


FORMULAS = (r"$$\{x\} *y* \_z_$$", r"$a \# *b* c$", r"\(x\!\{ *y*\)", r"\[\left\{ *a* \}\]")
"""Formulas as models write them, in all four ways. Their text is not markdown."""


def shown(*pieces: str) -> str:
    """Return what is printed for `pieces`, with names in place of escape sequences."""
    printer = MarkdownPrinter()
    text = "".join(map(printer.push, pieces)) + printer.finish()
    return re.sub(r"\x1b\[[0-9;]*m", lambda found: MARKS[found[0]], text)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", ""),
        ("plain\n\ntext\n", "plain\n\ntext\n"),
        ("# Title\nbody", "<h>Title</>\nbody"),
        ("####### no\n#no\n#", "####### no\n#no\n#"),
        ("- a\n  * b\n+ c\n1. d", "• a\n  • b\n• c\n1. d"),
        ("-no\n5 - 3", "-no\n5 - 3"),
        ("> said\n>more", "<f>│ said</>\n<f>│ more</>"),
        ("---\n***\n-- x", f"<f>{'─' * 24}</b>\n<f>{'─' * 24}</b>\n-- x"),
        ("a **b** c", "a <b>b</b> c"),
        ("*a* _b_ ***c*** __d__", "<i>a</i> <i>b</i> <b><i>c</i></b> <b>d</b>"),
        ("**a *b* c**", "<b>a <i>b</i><b> c</b>"),
        ("`a*b*` ``c`d``", "<c>a*b*</c> <c>c`d</c>"),
        ("2 * 3 * 4, 5*3 and snake_case_name", "2 * 3 * 4, 5*3 and snake_case_name"),
        ("*args and **kwargs", "*args and **kwargs"),
        ("an `open tick", "an `open tick"),
        ("\\*no\\* \\a", "*no* \\a"),
        ("**a\nb**", "**a\nb**"),
        ("****a****", "****a****"),
        ("# A **b** c", "<h>A <b>b</b><h> c</>"),
        ("```py\nx = *a*\n```\n*b*", "<f>```py</b>\n<c>x = *a*</>\n<f>```</b>\n<i>b</i>"),
        ("```\n````\nx", "<f>```</b>\n<f>````</b>\nx"),
        ("~~~~\n~~~\n~~~~", "<f>~~~~</b>\n<c>~~~</>\n<f>~~~~</b>"),
        ("```\nnever closed", "<f>```</b>\n<c>never closed</>"),
        ("```a``` b", "<c>a</c> b"),
        ("| a | b |\n|---|---|", "| a | b |\n|---|---|"),
        *((formula, formula) for formula in FORMULAS),
        *((f"**so** {formula} *x*", f"<b>so</b> {formula} <i>x</i>") for formula in FORMULAS),
        ("$5 *or* $6, $ *7* $", "$5 <i>or</i> $6, $ <i>7</i> $"),
        ("\\( *never* closed", "\\( <i>never</i> closed"),
    ],
)
def test_markdown_is_shown_however_it_is_cut(text: str, result: str) -> None:
    assert shown(text) == result
    for cut in all_cuts(text, seed=1):
        assert shown(*map(str, cut)) == result, cut


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=30), st.data())
def test_what_is_printed_does_not_depend_on_the_cut(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    whole = shown(text)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert shown(*parts) == whole == shown(*text)


@pytest.mark.parametrize("length", range(MAX_SPAN - 3, MAX_SPAN + 4))
def test_emphasis_without_an_end_is_printed_as_it_was_written(length: int) -> None:
    text = f"**{'a' * length}** b"
    expected = f"<b>{'a' * length}</b> b" if length <= MAX_SPAN else text
    assert shown(text) == expected == shown(*text)


def test_ordinary_text_is_not_held_back() -> None:
    printer = MarkdownPrinter()
    for piece in ("The ", "answer", " is 4", "2.\nAnd ", "so on"):
        assert printer.push(piece) == piece


def test_code_is_not_held_back() -> None:
    printer = MarkdownPrinter()
    printer.push("```\n")
    assert printer.push("x = ") == "\x1b[36mx = "
    assert printer.push("**a") == "**a"


def test_text_cannot_control_the_terminal() -> None:
    attack = "a\x1b[2Jb\x1b]0;title\x07c\r\x08\x9b31m\u202ed\u2066 é漢😀\t\n"
    assert safe_text(attack) == "a?[2Jb?]0;title?c???31m?d? é漢😀\t\n"
