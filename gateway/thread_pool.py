"""Runs a function in a thread while other greenlets continue.

If a function raises an exception in one of gevent's thread pools, the pool prints the exception and
also raises it in the greenlet that waits for the result. The printed message might quote a request.
So exceptions are caught in the thread here, and are only raised in the waiting greenlet.
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
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
    return result  # type: ignore[no-any-return]


def _attempt(work: Callable[[], T]) -> tuple[T, None] | tuple[None, BaseException]:
    """Return the result of `work` and None, or None and the exception that it raised."""
    try:
        return work(), None
    except BaseException as error:  # raised again in the waiting greenlet
        return None, error
