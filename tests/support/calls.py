"""Watches the calls of Python functions in a thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def watched_calls(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call `note` with the arguments of `sys.setprofile`'s function inside the `with` block, in
    this thread. The function that was set before is set again afterwards."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
