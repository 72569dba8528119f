"""The log format of a gateway process, which omits the messages of exceptions.

An exception's message may quote part of a prompt; its traceback does not. So the log contains the
frames and types of exceptions. It contains their messages only with --log-content, except those of
the operating system, which quote only names of the server's own files. gunicorn's own lines have
the same format.
"""

from __future__ import annotations

import logging
import os
import traceback
from types import TracebackType
from typing import TypeAlias

from protocol.process.log_lines import LineFormatter, LogStyle

_ExceptionInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class RedactingFormatter(logging.Formatter):
    """Formats exceptions without their messages."""

    def formatException(self, ei: _ExceptionInfo) -> str:
        return "" if ei[1] is None else "".join(redacted_lines(ei[1])).rstrip()


def redacted_lines(error: BaseException) -> list[str]:
    """Return the lines of the traceback of `error` without messages, beginning with its causes."""
    lines = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines = [*redacted_lines(cause), "then:\n"]
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    message = _system_message(error) or " (message omitted; --log-content shows it)"
    return [*lines, *frames, f"{kind}{message}\n"]


def _system_message(error: BaseException) -> str:
    """Return the message of a failed system call, after a colon; "" for all other errors, also for
    those of libraries that are derived from OSError."""
    if not isinstance(error, OSError) or type(error).__module__ != "builtins" or not error.errno:
        return ""
    file = f": {error.filename!r}" if error.filename is not None else ""
    return f": {os.strerror(error.errno)}{file}"


def formatter(style: LogStyle, *, shows_content: bool) -> LineFormatter:
    """Return a formatter that omits the messages of exceptions, unless `shows_content`."""
    return LineFormatter("gateway", style, None if shows_content else RedactingFormatter())


def set_up(style: LogStyle, *, shows_content: bool) -> None:
    """Send the log lines of gunicorn and of the gateway to stderr in one format.

    shows_content  include the messages of exceptions (--log-content)
    """
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(style, shows_content=shows_content))
    for name in ("gunicorn.error", "gateway"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
    logging.getLogger("gateway").setLevel(logging.INFO)
