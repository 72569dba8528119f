"""Computes a fingerprint of everything, except the model, that affects the bits of results.

- the compiled kernels
- the C library, because the kernels call its exponential and trigonometric functions
- the processor's features by which the C library chooses a version of these functions
- the dtype, and what is rounded to eight bits
- the version of torch, if torch computes a part of a step
"""

from __future__ import annotations

import os
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

HEX_DIGITS = 8
_LIBC = "CS_GNU_LIBC_VERSION"
_CHOOSES_BY = ("avx512f", "avx2", "fma", "fma4")
"""Flags of /proc/cpuinfo by which GNU's C library chooses the version of a function."""


def fingerprint(
    library: Path,
    dtype: str,
    *,
    rounded: Collection[str],
    cpu_flags: frozenset[str],
    torch: str = "",
) -> str:
    """Return the fingerprint, HEX_DIGITS hex digits. With equal fingerprints, a model gives the
    same bits.

    library   file of the compiled kernels; its whole content counts, so kernels from another
              compiler differ
    rounded   names of the data that is rounded to eight bits
    torch     version of torch; "": the kernels compute everything
    """
    libc = os.confstr(_LIBC) if _LIBC in os.confstr_names else "unknown"
    flags = [flag for flag in _CHOOSES_BY if flag in cpu_flags]
    facts = [sha256(library.read_bytes()).hexdigest(), str(libc), dtype, *sorted(rounded), *flags]
    if torch:
        facts.append(f"torch {torch}")
    return sha256("\n".join(facts).encode()).hexdigest()[:HEX_DIGITS]
