"""`LineWrapper`: breaks lines between words at the width of the terminal, while they arrive.

It is a stream machine: the printed text does not depend on how the input is cut, and printed text
is never changed. So a word is held back until it is complete, or as wide as a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tools.terminal import char_width

_PARTS = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)
"""Matches an escape sequence, or a character."""
MIN_COLUMNS = 20
"""Narrower terminals break lines themselves."""


class LineWrapper:
    """Wraps the text of one line after the other.

    columns   returns the width of the terminal, which is read at the start of each line; None: no
              line is wrapped
    """

    def __init__(self, columns: Callable[[], int] | None = None) -> None:
        self._columns = columns
        self._indent = ""
        self._start()

    def _start(self) -> None:
        columns = self._columns() if self._columns else 0
        self._width = columns if columns >= MIN_COLUMNS else 0  # 0: the line is not wrapped
        self._column = 0
        self._word, self._word_width = "", 0
        self._spaces = ""  # before the word, if they are not at the start of the line
        self._is_wide = False  # whether the word ends with a wide character

    def indent(self, text: str) -> None:
        """Put `text` at the start of the lines into which this line is broken."""
        self._indent = text

    def push(self, text: str) -> str:
        """Return what can be printed after the next piece of the line."""
        if not self._width:
            return text
        return "".join(map(self._push_part, _PARTS.findall(text)))

    def finish(self) -> str:
        """Return the rest of the line, without its end. The next piece starts another line."""
        rest = self._place() + self._spaces
        self._indent = ""
        self._start()
        return rest

    @property
    def _starts_deep(self) -> bool:
        """Whether most of the line would be spaces before its first word."""
        return len(self._spaces) > self._width // 2

    @property
    def _room(self) -> int:
        """The columns that a word can have. A wider one is broken."""
        at_start = self._column == 0 and not self._starts_deep
        return self._width - len(self._spaces if at_start else self._indent)

    def _push_part(self, part: str) -> str:
        if part == " ":
            done = self._place()
            self._spaces += part
            return done
        if len(part) > 1:  # an escape sequence
            self._word += part
            return ""
        width = char_width(part)
        done = ""
        is_wide = width == 2
        if width and (is_wide or self._is_wide):
            done = self._place()  # a line may be broken at a wide character
        elif self._word_width + width > self._room:
            done = self._place()
        self._word, self._word_width = self._word + part, self._word_width + width
        self._is_wide = is_wide if width else self._is_wide
        return done

    def _place(self) -> str:
        """Return the word after the spaces before it, or in a new line if it does not fit."""
        if not self._word:
            return ""
        if not self._word_width:  # only escape sequences, which belong before the spaces
            done, self._word = self._word, ""
            return done
        needed = len(self._spaces) + self._word_width
        may_break = self._column > len(self._indent) or self._starts_deep
        if self._column + needed > self._width and may_break:
            before, self._column = f"\n{self._indent}", len(self._indent) + self._word_width
        else:
            before, self._column = self._spaces, self._column + needed
        done = before + self._word
        self._word, self._word_width, self._spaces, self._is_wide = "", 0, "", False
        return done
