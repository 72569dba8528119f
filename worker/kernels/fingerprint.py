"""Computes a fingerprint of everything, except the model, that affects the bits of results.

- the source of the compiled kernels. It fixes the order of sums and calls no function of the C
  library, so compilers and instruction sets do not matter (csrc/simd.h, csrc/sums.h)
- the instruction set, if it computes numbers of this dtype in a way of its own
- the dtype, and what is rounded to eight bits or to bfloat16
- torch's version and instruction set, if torch computes a part of a step
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

HEX_DIGITS = 8


def fingerprint(
    source: str,
    bits_of_set: int,
    dtype: str,
    *,
    rounded: Collection[str],
    torch: str = "",
) -> str:
    """Return the fingerprint, HEX_DIGITS hex digits. With equal fingerprints, a model gives the
    same bits.

    source        digest of the kernels' source, or of the library if the source is not known
    bits_of_set   how the bits differ from those of other instruction sets (csrc/kernels.cpp)
    rounded       names of the data that is rounded
    torch         version and instruction set of torch; "": the kernels compute everything
    """
    facts = [source, str(bits_of_set), dtype, *sorted(rounded), torch]
    return sha256("\n".join(facts).encode()).hexdigest()[:HEX_DIGITS]


def source_of(digest: int, library: Path) -> str:
    """Return what stands for the source of a library: its digest, or if it is 0, that of the whole
    file."""
    return f"{digest:x}" if digest else sha256(library.read_bytes()).hexdigest()
