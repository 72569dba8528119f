"""The C heap of this process: how much of it is in use, and how to return the rest to the system.

llguidance allocates on this heap and reports no sizes, so the size of a compiled grammar is
measured as growth of the heap. Without glibc 2.33 or later nothing can be measured.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@dataclass(frozen=True, slots=True)
class HeapSize:
    """The size of the C heap."""

    used_bytes: int
    #: Bytes that were freed, whether or not their pages were returned to the system.
    free_bytes: int


class CHeap:
    """Measures and trims the C heap. A call takes milliseconds if the heap is fragmented."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._mallinfo = getattr(libc, "mallinfo2", None)
        self._trim = getattr(libc, "malloc_trim", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _MallInfo

    @property
    def can_measure(self) -> bool:
        return self._mallinfo is not None

    def size(self) -> HeapSize:
        """Return the size of the heap; zeros if it cannot be measured."""
        if self._mallinfo is None:
            return HeapSize(0, 0)
        info = self._mallinfo()
        return HeapSize(info.uordblks + info.hblkhd, info.fordblks)

    def trim(self) -> None:
        """Return the pages of freed memory to the system."""
        if self._trim is not None:
            self._trim(0)
