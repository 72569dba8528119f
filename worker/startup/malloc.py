"""The C library's heap, as a worker wants it: what a step has freed is there for the next one.

Left to itself, glibc gives large pieces back to the system as soon as they are free, and asks for
them anew in the next step: each page is zeroed and faulted in again. That took five sixths of the
time in which 64 rows drew their tokens.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_PIECE_BYTES = 32 << 20
"""Up to here pieces come from the heap; glibc allows no more. Larger ones are mapped, and go
back."""
KEPT_BYTES = 256 << 20
"""At most so much stays with the process that nothing uses."""


def keep_pages() -> bool:
    """From now on. False where the C library cannot do that (only glibc can)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((M_MMAP_THRESHOLD, LARGEST_PIECE_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES))
    return all([bool(mallopt(*pair)) for pair in wanted])
