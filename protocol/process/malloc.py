"""Settings of glibc's malloc. With another C library, these functions do nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAPPED_BYTES, KEPT_BYTES = 1 << 20, 16 << 20
"""`map_large_pieces` maps pieces from the first size on, and keeps the second of free memory at the
heap's end. With less, reading a body of 16 MiB took five times as long, for page faults."""

TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def huge_page_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable with which a child process gets huge pages for its memory. If the user
    has decided about them in `environment`, return none.

    Many systems give huge pages only to memory for which a program asks for them. glibc 2.35 and
    later does so if this variable is set when a program starts. Other C libraries ignore it. A step
    reads all weights and the K/V of its rows. With pages of 4 KiB, the processor looks up where
    each page is, in memory as well, and reads ahead only within a page.
    """
    given = environment.get(TUNABLES, "")
    if HUGE_PAGES in given:
        return {}
    return {TUNABLES: ":".join(filter(None, (given, f"{HUGE_PAGES}=1")))}


def set_malloc(*, mmap_threshold: int, trim_threshold: int) -> bool:
    """Set the sizes, in bytes, from which a piece is mapped instead of taken from the heap, and
    from which free memory at the heap's end is returned. Return False if that is not possible."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((M_MMAP_THRESHOLD, mmap_threshold), (M_TRIM_THRESHOLD, trim_threshold))
    return all([bool(mallopt(*pair)) for pair in wanted])


def map_large_pieces() -> bool:
    """Have each large piece of memory returned to the system as soon as it is freed. Return False
    if that is not possible.

    By default glibc raises its threshold, up to 32 MiB, whenever a larger piece is freed. Then the
    bodies of requests come from the heap, where a small piece behind them keeps them.
    """
    return set_malloc(mmap_threshold=MAPPED_BYTES, trim_threshold=KEPT_BYTES)


def return_free_memory() -> None:
    """Return free pages of the heap to the system.

    Temporary memory can leave megabytes of free pages below a piece that is still in use. malloc
    alone would never return them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
