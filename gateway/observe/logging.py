"""Log format of a gateway, gunicorn's lines included, with exception messages redacted.

The message of an exception may quote part of a prompt. Its traceback does not. So the log has the
frames and types of exceptions, and their messages only with --log-content.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType
from typing import TypeAlias

from protocol.log_lines import LineFormatter, LogStyle

_ExceptionInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class Redacted(logging.Formatter):
    def formatException(self, ei: _ExceptionInfo) -> str:
        return "" if ei[1] is None else "".join(redacted_lines(ei[1])).rstrip()


def redacted_lines(error: BaseException) -> list[str]:
    """Return the traceback of `error` without messages, its causes first."""
    lines = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines = [*redacted_lines(cause), "then:\n"]
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return [*lines, *frames, f"{kind} (message omitted; --log-content shows it)\n"]


def formatter(style: LogStyle, *, shows_content: bool) -> LineFormatter:
    """Return a formatter that omits the messages of exceptions, unless `shows_content`."""
    return LineFormatter("gateway", style, None if shows_content else Redacted())


def set_up(style: LogStyle, *, shows_content: bool) -> None:
    """Send the lines of gunicorn and of the gateway to stderr in one format."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(style, shows_content=shows_content))
    for name in ("gunicorn.error", "gateway"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
    logging.getLogger("gateway").setLevel(logging.INFO)
