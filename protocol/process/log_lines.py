"""Log lines: one format for all processes, as text or as JSON with one object per line."""

from __future__ import annotations

import datetime
import logging
import re
from typing import Literal, TypeAlias

import msgspec

LogStyle: TypeAlias = Literal["text", "color", "json"]
FIELDS = "fields"
"""Name of the attribute of a log record that contains the fields of its JSON line. A record
with this attribute needs no message.
"""

_COLORS = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
_ESCAPES = re.compile(rb"\x1b\[[0-9;]*m")


def colored(head: str, level: str) -> tuple[str, str]:
    """Return the head of a log line (time and process) and its level with their colours."""
    color = _COLORS.get(level, "1")
    return f"\x1b[2m{head}\x1b[0m", f"\x1b[{color}m{level}\x1b[0m"


class LineFormatter(logging.Formatter):
    """Formats the log lines of one process, such as `13:05:12 engine[41] INFO drained, by a
    signal`.

    process     name of the process in its log lines; the pid is added to it
    exceptions  formatter for exceptions; default: the standard one
    """

    def __init__(
        self,
        process: str,
        style: LogStyle = "text",
        exceptions: logging.Formatter | None = None,
    ) -> None:
        super().__init__("%(asctime)s", "%H:%M:%S")
        self._process = process
        self._is_json, self._has_color = style == "json", style == "color"
        self._exceptions = exceptions or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        return self._json(record) if self._is_json else super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        head, level = f"{record.asctime} {self._process}[{record.process}]", record.levelname
        if self._has_color:
            head, level = colored(head, level)
        return f"{head} {level} {record.message}"

    def formatException(self, ei: object) -> str:
        return self._exceptions.formatException(ei)  # type: ignore[arg-type]

    def _json(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "process": f"{self._process}[{record.process}]",
        }
        if (fields := getattr(record, FIELDS, None)) is not None:
            line |= {"event": "request", **fields}
        else:
            line |= {"event": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _JsonLine(msgspec.Struct):
    level: str
    message: str


def without_colors(line: bytes) -> bytes:
    """Return a line without the colours of `LineFormatter`."""
    return _ESCAPES.sub(b"", line)


def without_style(line: str) -> str:
    """Return "LEVEL message" if `line` is JSON, else `line` without colours."""
    try:
        found = msgspec.json.decode(line, type=_JsonLine)
        return f"{found.level} {found.message}"
    except msgspec.MsgspecError:
        return without_colors(line.encode()).decode()


def log_to_stderr(process: str, style: LogStyle = "text") -> None:
    """Make this process log to stderr. A later call replaces the format of an earlier one."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(process, style))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
