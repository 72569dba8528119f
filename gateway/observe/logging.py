"""Log format of a gateway, gunicorn's lines included, with exception messages redacted."""

from __future__ import annotations

import logging

from gateway.observe.redaction import Redacted
from protocol.log_lines import LineFormatter, LogStyle


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
