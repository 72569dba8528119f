"""The messages that a user types: lines joined to messages, and the history of the lines.

A message is one line, unless the line ends with a backslash, which continues it, or starts with
three double quotes. Then it goes on until a line that ends with three double quotes.

The history is kept in a file for the owner only. readline edits the lines and searches the history
(Ctrl-R).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

QUOTES = '"""'
MAX_LINES = 1000
"""Lines that the file of the history keeps."""


class MessageLines:
    """Joins lines to messages."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._is_quoted = False

    @property
    def is_open(self) -> bool:
        """Whether the message continues in the next line."""
        return bool(self._lines) or self._is_quoted

    def push(self, line: str) -> str | None:
        """Add a line, without its end. Return the message if it is complete."""
        if not self.is_open and line.lstrip().startswith(QUOTES):
            self._is_quoted, line = True, line.lstrip()[len(QUOTES) :]
        is_end = line.rstrip().endswith(QUOTES) if self._is_quoted else not line.endswith("\\")
        if is_end and self._is_quoted:
            line = line.rstrip()[: -len(QUOTES)]
        self._lines.append(line if self._is_quoted or is_end else line[:-1])
        return self.finish() if is_end else None

    def finish(self) -> str:
        """Return the message as far as it came, and start a new one."""
        text = "\n".join(self._lines).strip()
        self._lines, self._is_quoted = [], False
        return text


def read_history(file: Path) -> list[str]:
    """Return the lines of a history, the newest last; none if the file cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace").split("\n")[-MAX_LINES - 1 : -1]
    return []


def add_to_history(file: Path, lines: Sequence[str]) -> None:
    """Add lines to the file of a history, which is created if necessary, and keep the newest
    MAX_LINES. The file is replaced atomically. Raises OSError if it cannot be written."""
    added = [part for line in lines for part in line.split("\n") if part.strip()]
    if not added:
        return
    kept = [*read_history(file), *added][-MAX_LINES:]
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # mode 0600
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.unlink, name)
        with open(descriptor, "w", encoding="utf-8", errors="replace") as new:
            new.write("\n".join(kept) + "\n")
        os.replace(name, file)
        on_failure.pop_all()
