"""Sets glibc's malloc to keep memory that a step has freed for the next step.

By default glibc returns large pieces to the system as soon as they are freed, and requests them
again in the next step, so each page is zeroed and faulted in again. Without these settings that was
five sixths of the time of sampling 64 rows.
"""

from __future__ import annotations

from protocol.process.malloc import set_malloc

LARGEST_PIECE_BYTES = 32 << 20
"""Pieces up to this size come from the heap; glibc allows no higher limit. Larger pieces are
mapped, and returned to the system when they are freed."""
KEPT_BYTES = 256 << 20
"""The most unused memory that the process keeps."""


def keep_pages() -> bool:
    """Apply the settings to all later frees. Return False if the C library is not glibc."""
    return set_malloc(mmap_threshold=LARGEST_PIECE_BYTES, trim_threshold=KEPT_BYTES)
