"""`MarkdownPrinter`: shows markdown on a terminal while it arrives.

It is a stream machine: the printed text does not depend on how the input is cut, and printed text
is never changed. So it holds back what it cannot show yet: the start of a line that may become a
heading, a list or a fence, and emphasised text until its end. That is at most one line, and at most
MAX_SPAN characters of it: emphasis that does not end within these is printed as it was written.
Lines are wrapped at the width of the terminal, except code.

Shown are headings, lists, quotations, rules, fenced code, `code`, **strong** and *emphasised* text.
Everything else, such as tables, links and formulas, is printed as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tools.chat.wrap import LineWrapper

MAX_SPAN = 200
"""The longest emphasised text, in characters."""
RESET = "\x1b[0m"


class Look(NamedTuple):
    """Terminal escape sequences before and after a piece of text, such as for bold."""

    on: str
    off: str


STRONG = Look("\x1b[1m", "\x1b[22m")
EMPHASIS = Look("\x1b[3m", "\x1b[23m")
BOTH = Look(STRONG.on + EMPHASIS.on, EMPHASIS.off + STRONG.off)
CODE = Look("\x1b[36m", "\x1b[39m")
FAINT = Look("\x1b[2m", "\x1b[22m")
HEADING = Look("\x1b[1;4m", "\x1b[22;24m")

_FORMULAS = {"$$": r"\$\$", "$": r"(?<![\s\\])\$(?![\d$])", "\\(": r"\\\)", "\\[": r"\\\]"}
"""The start of a formula -> the pattern of its end. As in pandoc, a dollar with a space before it,
or a digit after it, ends none."""
_INLINE = re.compile(
    r"(?P<formula>\\[(\[]|(?<![\\$])\${1,2}(?![\s$]))"
    r"|\\(?P<escaped>[\\`*_#>~|+.!()\[\]{}-])"
    r"|(?P<ticks>(?<!`)`+(?!`))"
    r"|(?P<stars>(?<![*\w])\*{1,3}(?![*\s]))"
    r"|(?P<bars>(?<![_\w])_{1,2}(?![_\s]))"
)
"""An escaped character, or a marker that may start a formula, code or emphasis. One character after
a marker decides whether it is one, except after an escaped character."""
_UNDECIDED = re.compile(r"[\\`*_$][`*_$]*\Z")
"""The end of a text, if what follows decides whether it is a marker."""
_BLOCK = re.compile(
    r"(?P<indent>[ ]*)(?:"
    r"(?P<fence>`{3,}|~{3,})[^`\n]*\Z"
    r"|(?P<heading>\#{1,6})[ ]"
    r"|(?P<item>[-*+])[ ]"
    r"|(?P<number>\d{1,9}[.)])[ ]+"
    r"|(?P<quote>>)[ ]?"
    r")",
    re.VERBOSE,
)
_RULE = re.compile(r" {0,3}(-{3,}|\*{3,}|_{3,}) *")
_MAY_BE_BLOCK = re.compile(
    r" *(#{0,6}|[-*_]*[ ]*|\+|>|\d{1,9}([.)][ ]*)?|`{0,2}|~{0,2}|(`{3,}|~{3,})[^`]*)"
)
"""The start of a line that is not known to be a block or an ordinary line yet."""
_FENCE_START = re.compile(r" *(`*|~*) *")
"""The start of a line in fenced code that may be the end of the code."""


def _close_of(opened: re.Match[str]) -> re.Pattern[str]:
    """Return the pattern of the marked text and its end, after the marker that starts it."""
    marker = re.escape(opened[0])
    if opened["formula"]:
        return re.compile(rf"(?P<text>.{{1,{MAX_SPAN}}}?){_FORMULAS[opened[0]]}")
    if opened["ticks"]:
        return re.compile(rf"(?P<text>.{{1,{MAX_SPAN}}}?)(?<!`){marker}(?!`)")
    char = re.escape(opened[0][0])
    after = rf"(?![{char}\w])" if char == "_" else rf"(?!{char})"
    return re.compile(rf"(?P<text>.{{1,{MAX_SPAN}}}?)(?<![\s{char}]){marker}{after}")


class MarkdownPrinter:
    """Converts pieces of markdown into text for a terminal.

    columns   returns the width of the terminal; None: lines are not wrapped
    """

    def __init__(self, columns: Callable[[], int] | None = None) -> None:
        self._wrapper = LineWrapper(columns)
        self._held = ""
        self._before = "\n"  # the last character that was converted
        self._fence = ""  # the marker that started the fenced code; "": not in code
        self._look = ""  # the sequence that applies to the rest of the line

    def push(self, text: str) -> str:
        """Return what can be printed after the next piece of text."""
        *lines, rest = (self._held + text).split("\n")
        done = "".join(self._line(line, is_whole=True) for line in lines)
        return done + self._line(rest, is_whole=False)

    def finish(self) -> str:
        """Return the rest of the text."""
        if not self._held and self._before == "\n":
            return ""
        return self._line(self._held, is_whole=True).removesuffix("\n")

    def _line(self, text: str, *, is_whole: bool) -> str:
        """Return the converted part of a line, and keep the rest in `_held`. `text` starts where
        the last call has stopped."""
        printed, is_start = "", self._before == "\n"
        if is_start:
            undecided = _FENCE_START if self._fence else _MAY_BE_BLOCK
            if not is_whole and undecided.fullmatch(text):
                self._held = text
                return ""
            printed, text = self._start_line(text, is_whole=is_whole)
        if self._fence:
            printed, text = printed + text, ""
        else:
            converted, text = self._inline(text, is_whole=is_whole)
            printed = self._wrapper.push(printed + converted)
        self._held = text
        if is_whole:
            printed += self._wrapper.finish() + (RESET if self._look else "") + "\n"
            self._look, self._before, self._held = "", "\n", ""
        return printed

    def _start_line(self, text: str, *, is_whole: bool) -> tuple[str, str]:
        """Return the start of a line as it is printed, and the rest of the line."""
        self._before = " "
        if self._fence:
            closing = text.strip()
            if closing and set(closing) == {self._fence[0]} and len(closing) >= len(self._fence):
                self._fence = ""
                return FAINT.on + text + FAINT.off, ""
            self._look = CODE.on
            return CODE.on, text
        if is_whole and _RULE.fullmatch(text):
            return f"{FAINT.on}{'─' * 24}{FAINT.off}", ""
        found = _BLOCK.match(text)
        if found is None:
            return "", text
        indent, rest = found["indent"], text[found.end() :]
        if found["fence"]:
            self._fence = found["fence"]
            return FAINT.on + text + FAINT.off, ""
        if found["heading"]:
            self._look = HEADING.on
            return HEADING.on, rest
        if found["quote"]:
            self._look = FAINT.on
            self._wrapper.indent(f"{indent}│ ")
            return f"{indent}{FAINT.on}│ ", rest
        if found["number"]:
            self._wrapper.indent(" " * found.end())
            return found[0], rest
        self._wrapper.indent(f"{indent}  ")
        return f"{indent}• ", rest

    def _inline(self, text: str, *, is_whole: bool) -> tuple[str, str]:
        """Return the converted part of a line's text, and the rest, which is not known to be
        complete."""
        printed, place = "", 0
        while opened := _INLINE.search(self._before + text, place + 1):
            start, after = opened.start() - 1, opened.end() - 1
            printed, place = printed + text[place:start], start
            if not is_whole and not opened["escaped"] and after >= len(text):
                break  # the next character decides whether it is a marker
            if opened["escaped"]:
                printed, place = printed + opened["escaped"], after
                continue
            close = _close_of(opened).match(text, after)
            if close and (is_whole or close.end() < len(text)):
                printed += self._marked(opened, close)
                place = close.end()
            elif not is_whole and len(text) - after <= MAX_SPAN + len(opened[0]):
                break
            else:
                printed, place = printed + opened[0], after
        rest = text[place:]
        undecided = None if is_whole or opened else _UNDECIDED.search(rest)
        end = undecided.start() if undecided else (0 if opened else len(rest))
        printed, kept = printed + rest[:end], rest[end:]
        consumed = text[: len(text) - len(kept)]
        self._before = consumed[-1:] or self._before
        return printed, kept

    def _marked(self, opened: re.Match[str], close: re.Match[str]) -> str:
        """Return marked text with its look, and then the look of the rest of the line. A formula
        has no look, and is returned as it was written."""
        text = close["text"]
        if opened["formula"]:
            return opened[0] + close[0]
        if opened["ticks"]:
            return CODE.on + text + CODE.off + self._look
        look = {1: EMPHASIS, 2: STRONG, 3: BOTH}[len(opened[0])]
        inner = MarkdownPrinter()
        inner._before, inner._look = " ", self._look + look.on
        converted, _ = inner._inline(text, is_whole=True)
        return look.on + converted + look.off + self._look
