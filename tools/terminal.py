"""Terminal output of commands: log lines, progress, failures, and names made safe to print."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import unicodedata
from collections.abc import Callable, Sequence

from protocol.process.log_lines import LineFormatter, LogStyle, without_colors


def log_style(log_format: str | None) -> LogStyle:
    """Return the style of log lines for the option --log-format: text has colours on a terminal."""
    if log_format == "json":
        return "json"
    is_smart = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return "color" if is_smart and use_colors() else "text"


def use_colors() -> bool:
    """Return whether stdout is a terminal and the user has not turned colours off."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


class Terminal:
    """Prints failures and progress to stderr, everything else to stdout. A closed stdout or stderr
    is ignored."""

    def __init__(self, style: LogStyle = "text") -> None:
        self.style = style
        self._formatter = LineFormatter("tidegate", style)
        self._keep: Callable[[Sequence[bytes]], None] | None = None

    def keep_lines(self, keep: Callable[[Sequence[bytes]], None]) -> None:
        """From now on, also pass log lines and failures to a function, without colours."""
        self._keep = keep

    def log(self, message: str) -> None:
        """Print a log line."""
        with contextlib.suppress(OSError):
            print(self._kept_line(logging.INFO, message), flush=True)

    def warn(self, message: str) -> None:
        """Print a log line about something that the user may want to change."""
        with contextlib.suppress(OSError):
            print(self._kept_line(logging.WARNING, message), flush=True)

    def progress(self, message: str) -> None:
        """Print a line of progress to stderr, as plain text or as a JSON line."""
        line = self._line(logging.INFO, message) if self.style == "json" else message
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    def show(self, banner: str) -> None:
        """Print a text of several lines. If the log format is JSON, log only the text's first
        line."""
        if self.style == "json":
            self.log(banner.strip().partition("\n")[0])
            return
        self._kept_line(logging.INFO, banner.strip().partition("\n")[0])
        with contextlib.suppress(OSError):
            print(banner, flush=True)

    def fail(self, message: str) -> None:
        """Print a failure to stderr as `tidegate: MESSAGE`, or as a JSON line."""
        line = self._kept_line(logging.ERROR, message)
        line = line if self.style == "json" else f"tidegate: {message}"
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    def _kept_line(self, level: int, message: str) -> str:
        """Return a log line, after it was kept if lines are kept."""
        line = self._line(level, message)
        if self._keep is not None:
            self._keep([without_colors(line.encode())])
        return line

    def _line(self, level: int, message: str) -> str:
        levels = {"levelno": level, "levelname": logging.getLevelName(level)}
        record = logging.makeLogRecord({"name": "tidegate", "msg": message, **levels})
        return self._formatter.format(record)


def clean(text: str) -> str:
    """Return `text` with "?" in place of control, combining and wide characters, so that every
    character has width 1."""
    return "".join(char if _is_plain(char) else "?" for char in text)


def char_width(char: str) -> int:
    """Return the columns that a character takes on a terminal: 0, 1 or 2."""
    if unicodedata.category(char) in _ZERO_WIDTH:
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


_ZERO_WIDTH = ("Mn", "Me", "Cf")
"""Categories of characters that take no column: marks above others, joiners, selectors."""


def _is_plain(char: str) -> bool:
    return char.isprintable() and not unicodedata.combining(char) and char_width(char) == 1


_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_UNSAFE = dict.fromkeys([*_CONTROLS, *_DIRECTIONS, 0x2028, 0x2029], "?")
_UNSAFE = {code: mark for code, mark in _UNSAFE.items() if chr(code) not in "\n\t"}


def safe_text(text: str) -> str:
    """Return `text` with "?" in place of characters that could control the terminal: escape
    sequences, and marks that change the direction of text. Lines and tabs stay."""
    return text.translate(_UNSAFE)


def cut(text: str, width: int) -> str:
    """Return `text`, shortened to `width` characters if it is longer. The last one is then an
    ellipsis."""
    if len(text) <= width:
        return text
    return text[: max(0, width - 1)] + "…" if width > 0 else ""


def memory_size(num_bytes: int) -> str:
    """Return a size in memory as text: "50.0 MiB", "1.25 GiB"."""
    gib = num_bytes / (1 << 30)
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"
