"""Threads with large stacks, because llguidance recurses over its input. With the usual 8 MB, a
chain of 20,000 references overflows the stack and crashes the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

STACK_BYTES = 512 << 20
"""Stack size of each thread. Only the pages that the thread touches use memory."""

T = TypeVar("T")


@contextmanager
def large_stacks() -> Iterator[None]:
    """Give a large stack to each thread that is started in the `with` block."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def call(function: Callable[[], T]) -> T:
    """Return what `function` returns, or raise what it raises, in a thread with a large stack."""
    with large_stacks(), ThreadPoolExecutor(1, "large-stack") as pool:
        return pool.submit(function).result()
