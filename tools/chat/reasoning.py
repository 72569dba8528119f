"""`ReasoningPrinter`: shows a model's reasoning in faint text above its answer."""

from __future__ import annotations

from tools.terminal import safe_text

FAINT, PLAIN = "\x1b[2m", "\x1b[0m"


class ReasoningPrinter:
    """Converts pieces of reasoning into text for a terminal. Characters that could control the
    terminal are replaced."""

    def __init__(self) -> None:
        self._is_open = False

    def push(self, text: str) -> str:
        start = "" if self._is_open else FAINT
        self._is_open = True
        return start + safe_text(text)

    def finish(self) -> str:
        """Return the text that ends the reasoning; "" if there was none since the last call."""
        end = f"{PLAIN}\n\n" if self._is_open else ""
        self._is_open = False
        return end
