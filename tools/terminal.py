"""Terminal output of a command that starts a server: log lines, the banner, and the failure."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from protocol.log_lines import LineFormatter, LogStyle


def log_style(log_format: str | None) -> LogStyle:
    """Return the style of log lines for `log_format`. Text has colours on a terminal."""
    if log_format == "json":
        return "json"
    shows_colors = sys.stdout.isatty() and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return "color" if shows_colors and os.environ.get("TERM") != "dumb" else "text"


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
