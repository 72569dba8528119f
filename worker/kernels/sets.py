"""The instruction sets that kernels are compiled for, best first: one library each.

setup.py reads this to compile, and library.py to load. It imports nothing.
"""

from __future__ import annotations

from typing import NamedTuple


class InstructionSet(NamedTuple):
    """needs: flags of /proc/cpuinfo that a processor must have; options: of the compiler."""

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")


def _x86(name: str, flags: tuple[str, ...], *more: str) -> InstructionSet:
    """`more`: flags that the compiler spells without the system's underscore."""
    spelt = [flag.replace("_", "") for flag in more]
    return InstructionSet(
        name, frozenset((*flags, *more)), tuple(f"-m{flag}" for flag in (*flags, *spelt))
    )


INSTRUCTION_SETS = (
    _x86("avx512bf16", _AVX512, "avx512_bf16"),
    _x86("avx512", _AVX512),
    _x86("avx2", _AVX2),
    InstructionSet("generic", frozenset(), ()),
)
"""The last one is what the compiler takes for granted on the machine that it compiles for."""
