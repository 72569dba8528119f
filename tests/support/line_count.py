"""Counts the lines of our own code that a piece of work executes.

Unlike a time, the count does not depend on the machine and its load. Unlike the number of calls
(work.py), it grows with a loop that calls nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
ROOMS = tuple(f"{ROOT}/{room}/" for room in ("protocol", "gateway", "engine_core", "worker"))

TraceFunction = Callable[[FrameType, str, Any], Any]


def executed_lines(work: Callable[[], object]) -> int:
    """Return the number of lines that `work` executes. A line counts each time it is executed."""
    num_lines = 0

    def on_line(frame: FrameType, event: str, _: Any) -> TraceFunction:
        nonlocal num_lines
        num_lines += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> TraceFunction | None:
        return on_line if frame.f_code.co_filename.startswith(ROOMS) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return num_lines
