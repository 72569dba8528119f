"""Watches the calls of Python functions in a thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def watched_calls(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Make `note` this thread's profile function (`sys.setprofile`) inside the `with` block. The
    previous profile function is restored afterwards."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
