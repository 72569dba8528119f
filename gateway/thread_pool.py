"""Runs a function in a thread while other greenlets continue.

If a function raises an exception in one of gevent's thread pools, the pool prints the exception and
also raises it in the greenlet that waits for the result. The printed message might quote a request.
So exceptions are caught in the thread here, and are only raised in the waiting greenlet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from gevent.threadpool import ThreadPool

T = TypeVar("T")

SWITCH_S = 0.0005
"""How long Python computes in a thread while another one waits to run. The thread that serves all
requests waits anew after each system call: 16 images of 16 MB delayed /livez by 66 to 116 ms with
Python's default of 5 ms, and delay it by 32 to 67 ms with this (idle machine, two cores)."""


def switch_often() -> None:
    """Let the threads of this process take turns after SWITCH_S."""
    sys.setswitchinterval(SWITCH_S)


class ThreadJob(Generic[T]):
    """A function that runs in a thread of `pool`, even if the greenlet that waits for it ends."""

    def __init__(self, pool: ThreadPool, work: Callable[[], T]) -> None:
        self._done = pool.spawn(_attempt, work)

    @property
    def has_ended(self) -> bool:
        return bool(self._done.ready())

    def result(self) -> T:
        """Wait for the end. Return the result of the function, or raise what it raised."""
        value: T = _value_of(self._done.get())
        return value


def result_of(pool: ThreadPool, work: Callable[[], T]) -> T:
    """Run `work` in `pool` and return its result. Raises what `work` raises."""
    value: T = _value_of(pool.apply(_attempt, (work,)))
    return value


def _value_of(outcome: tuple[T, None] | tuple[None, BaseException]) -> T:
    """Return the result of what `_attempt` has run, or raise its exception."""
    result, error = outcome
    if error is not None:
        try:
            raise error
        finally:
            del error, outcome  # their traceback holds this frame
    return result  # type: ignore[return-value]


def _attempt(work: Callable[[], T]) -> tuple[T, None] | tuple[None, BaseException]:
    """Return the result of `work` and None, or None and the exception that it raised."""
    try:
        return work(), None
    except BaseException as error:  # raised again in the waiting greenlet
        return None, error
