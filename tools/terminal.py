"""Terminal output: log lines, banner and failure of a server, and names made safe to print."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import unicodedata

from protocol.log_lines import LineFormatter, LogStyle


def log_style(log_format: str | None) -> LogStyle:
    """Return the style of log lines for `log_format`. Text has colours on a terminal."""
    if log_format == "json":
        return "json"
    is_smart = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return "color" if is_smart and use_colors() else "text"


def use_colors() -> bool:
    """Return whether stdout is a terminal and the user has not turned colours off."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


class Terminal:
    """Prints failures and progress to stderr, the rest to stdout. Never raises."""

    def __init__(self, style: LogStyle = "text") -> None:
        self.style = style
        self._formatter = LineFormatter("tidegate", style)

    def log(self, message: str) -> None:
        """Print a log line."""
        with contextlib.suppress(OSError):
            print(self._line(logging.INFO, message), flush=True)

    def progress(self, message: str) -> None:
        """Print a line of progress to stderr, as plain text or as a JSON line."""
        line = self._line(logging.INFO, message) if self.style == "json" else message
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    def show(self, banner: str) -> None:
        """Print text of several lines. In JSON, log only its first line."""
        if self.style == "json":
            self.log(banner.strip().partition("\n")[0])
            return
        with contextlib.suppress(OSError):
            print(banner, flush=True)

    def fail(self, message: str) -> None:
        """Print a failure to stderr as `tidegate: MESSAGE`, or as a JSON line."""
        is_json = self.style == "json"
        line = self._line(logging.ERROR, message) if is_json else f"tidegate: {message}"
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    def _line(self, level: int, message: str) -> str:
        levels = {"levelno": level, "levelname": logging.getLevelName(level)}
        record = logging.makeLogRecord({"name": "tidegate", "msg": message, **levels})
        return self._formatter.format(record)


def clean(text: str) -> str:
    """Replace control, combining and wide characters with "?", so each character has width 1."""
    return "".join(char if _is_plain(char) else "?" for char in text)


def _is_plain(char: str) -> bool:
    if not char.isprintable() or unicodedata.combining(char):
        return False
    return unicodedata.east_asian_width(char) not in ("W", "F")


def cut(text: str, width: int) -> str:
    """Shorten `text` to `width` characters, with an ellipsis if it was longer."""
    if len(text) <= width:
        return text
    return text[: max(0, width - 1)] + "…" if width > 0 else ""
