"""Waits for conditions. Tests wait only with these functions, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

HANG_S = 60.0
"""The longest time that a test waits for anything. It only keeps a test from hanging."""
T = TypeVar("T")


def eventually(
    claim: Callable[[], T],
    *,
    within_s: float = HANG_S,
    every_s: float = 0.01,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Return the first true value of `claim`, or its last value when the time is up.

    pause   how to wait between two calls; `gevent.sleep` lets a test's own hub run
    """
    give_up_at = time.monotonic() + within_s
    while not (value := claim()) and time.monotonic() < give_up_at:
        pause(every_s)
    return value


async def eventually_async(claim: Callable[[], Awaitable[T]], *, within_s: float = HANG_S) -> T:
    """Return the first true value of the awaited `claim`, or its last value when the time is up."""
    give_up_at = time.monotonic() + within_s
    while not (value := await claim()) and time.monotonic() < give_up_at:
        pass
    return value
