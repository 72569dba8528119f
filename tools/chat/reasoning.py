"""`ReasoningPrinter`: shows a model's reasoning in faint text above its answer."""

from __future__ import annotations

from collections.abc import Callable

from tools.chat.wrap import LineWrapper
from tools.terminal import safe_text

FAINT, PLAIN = "\x1b[2m", "\x1b[0m"


class ReasoningPrinter:
    """Converts pieces of reasoning into text for a terminal. Characters that could control the
    terminal are replaced.

    columns   returns the width of the terminal; None: lines are not wrapped
    """

    def __init__(self, columns: Callable[[], int] | None = None) -> None:
        self._wrapper = LineWrapper(columns)
        self._is_open = False

    def push(self, text: str) -> str:
        start = "" if self._is_open else FAINT
        self._is_open = True
        *lines, rest = safe_text(text).split("\n")
        whole = (self._wrapper.push(line) + self._wrapper.finish() + "\n" for line in lines)
        return start + "".join(whole) + self._wrapper.push(rest)

    def finish(self) -> str:
        """Return the text that ends the reasoning; "" if there was none since the last call."""
        end = f"{self._wrapper.finish()}{PLAIN}\n\n" if self._is_open else ""
        self._is_open = False
        return end
