"""How a gateway's own lines look on stderr: text for people, or one JSON object per line."""

from __future__ import annotations

import datetime
import logging
import os

import msgspec

from gateway.access_log import FIELDS
from gateway.discretion import Discreet

_GUNICORN_TEXT = "%(asctime)s [%(process)d] [%(levelname)s] %(message)s"
TEXT = "%(asctime)s gateway[%(process)d] %(levelname)s %(message)s"


class JsonLines(logging.Formatter):
    """words: tells exceptions by `formatException`, so it decides whether their words are told"""

    def __init__(self, words: logging.Formatter) -> None:
        super().__init__()
        self._words = words

    def format(self, record: logging.LogRecord) -> str:
        """`event` is "request" for the line of a request; others have a message in words."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "process": f"gateway[{os.getpid()}]",
        }
        if (fields := getattr(record, FIELDS, None)) is not None:
            line |= {"event": "request", **fields}
        else:
            line |= {"event": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self._words.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def formatter(kind: str, *, shows_content: bool) -> logging.Formatter:
    """kind: GatewayConfig.log_format"""
    words = (logging.Formatter if shows_content else Discreet)(TEXT, "%H:%M:%S")
    return JsonLines(words) if kind == "json" else words


def set_up(kind: str, *, shows_content: bool) -> None:
    """Our own lines, beside gunicorn's, on stderr. Neither tells the words of an exception, unless
    `shows_content`."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(kind, shows_content=shows_content))
    root = logging.getLogger("gateway")
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    if not shows_content:
        for other in logging.getLogger("gunicorn.error").handlers:
            other.setFormatter(Discreet(_GUNICORN_TEXT, "[%Y-%m-%d %H:%M:%S %z]"))
