"""Work in threads beside the greenlets, which go on meanwhile.

What a thread of gevent's pools raises is raised where its result is awaited, and printed as well,
with all that it says: words of a request, perhaps. So nothing is ever raised there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gevent.threadpool import ThreadPool

T = TypeVar("T")


def result_of(pool: ThreadPool, work: Callable[[], T]) -> T:
    """Of `work`, done in `pool`. Raises what it raises, here alone."""
    result, error = pool.apply(_attempt, (work,))
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _attempt(work: Callable[[], T]) -> tuple[T, None] | tuple[None, BaseException]:
    try:
        return work(), None
    except BaseException as error:  # whoever waits for it decides what it means
        return None, error
