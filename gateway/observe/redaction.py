"""Log lines without what people wrote.

What an exception says may quote the value that it is about, which may be a part of a prompt. Where
it was raised does not. So a log has the frames and the kinds of exceptions, and not their words,
unless the operator wants them (--log-content).
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType
from typing import TypeAlias

_ExceptionInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class Redacted(logging.Formatter):
    def formatException(self, ei: _ExceptionInfo) -> str:
        return "" if ei[1] is None else "".join(told(ei[1])).rstrip()


def told(error: BaseException) -> list[str]:
    """Lines: the causes first, as Python tells them, each without its words."""
    lines = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines = [*told(cause), "then:\n"]
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return [*lines, *frames, f"{kind} (its words are left out; --log-content has them)\n"]
