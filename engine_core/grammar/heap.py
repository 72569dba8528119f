"""The C heap of this process: how much of it is in use, and how the rest returns to the system.

llguidance allocates on this heap and reports no sizes, so the size of a compiled grammar is
measured as growth of the heap. Without glibc 2.33 or later nothing can be measured.
"""

from __future__ import annotations

import ctypes
import resource


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h
MAPPED_BYTES = 2 << 20
"""Larger pieces are mapped, and returned to the system when they are freed. By default glibc raises
this limit to 32 MB when such pieces are freed."""
MAX_ARENAS = 2
"""One for the loop and one for the other threads. With one for each thread, compilations leave
several times as much memory in fragments."""


class CHeap:
    """Measures and trims the C heap. A call takes milliseconds if the heap is fragmented."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._mallopt = getattr(libc, "mallopt", None)
        self._mallinfo = getattr(libc, "mallinfo2", None)
        self._trim = getattr(libc, "malloc_trim", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _MallInfo

    @property
    def can_measure(self) -> bool:
        return self._mallinfo is not None

    def limit_fragments(self) -> None:
        """Set glibc's malloc, for this process, to leave less freed memory in fragments. Call it
        before the threads start."""
        if self._mallopt is not None:
            self._mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
            self._mallopt(M_ARENA_MAX, MAX_ARENAS)

    def used_bytes(self) -> int:
        """Return the bytes in use on the heap; 0 if they cannot be measured."""
        if self._mallinfo is None:
            return 0
        info = self._mallinfo()
        return int(info.uordblks + info.hblkhd)

    def slack_bytes(self) -> int:
        """Return the bytes of resident memory that are not in use on the heap. Apart from a fixed
        part, they are freed memory that was not returned to the system."""
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        return resident - self.used_bytes()

    def trim(self) -> None:
        """Return the pages of freed memory to the system."""
        if self._trim is not None:
            self._trim(0)
