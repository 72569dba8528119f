"""Runs work in threads while other greenlets continue.

gevent's thread pools print an exception in addition to raising it where the result is awaited. Its
message may quote a request. So exceptions are caught in the thread and raised by the waiter only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gevent.threadpool import ThreadPool

T = TypeVar("T")


def result_of(pool: ThreadPool, work: Callable[[], T]) -> T:
    """Run `work` in `pool` and return its result. Raises what `work` raises."""
    result, error = pool.apply(_attempt, (work,))
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _attempt(work: Callable[[], T]) -> tuple[T, None] | tuple[None, BaseException]:
    try:
        return work(), None
    except BaseException as error:  # raised again by the waiter
        return None, error
