"""The instruction sets that kernels are compiled for, best first. Each set has its own library.

setup.py reads this list to compile the libraries, and library.py to load one. This file imports
nothing of Tidegate, because it is read before Tidegate is installed.
"""

from __future__ import annotations

from typing import NamedTuple


class InstructionSet(NamedTuple):
    """Extensions of a processor's instruction set for which the kernels are compiled as one
    library."""

    name: str
    #: Architecture, as `platform.machine()` names it on Linux; "": any.
    machine: str
    #: Flags of /proc/cpuinfo that a processor must have.
    needs: frozenset[str]
    #: Options for the compiler.
    options: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")


def _x86(name: str, flags: tuple[str, ...], *more: str) -> InstructionSet:
    """Return an x86 instruction set that needs `flags` and `more`.

    The compiler spells the flags in `more` without the underscores of /proc/cpuinfo.
    """
    spelt = [flag.replace("_", "") for flag in more]
    options = tuple(f"-m{flag}" for flag in (*flags, *spelt))
    return InstructionSet(name, "x86_64", frozenset((*flags, *more)), options)


def _arm(name: str, march: str, *flags: str) -> InstructionSet:
    """Return an instruction set of 64-bit ARM that needs `flags`."""
    return InstructionSet(name, "aarch64", frozenset(flags), (f"-march={march}",))


INSTRUCTION_SETS = (
    _x86("avx512bf16", _AVX512, "avx512_bf16", "avx512_vnni"),
    _x86("avx512", _AVX512),
    _x86("avxvnni", _AVX2, "avx_vnni"),
    _x86("avx2", _AVX2),
    _arm("i8mm", "armv8.2-a+dotprod+i8mm", "asimddp", "i8mm"),
    _arm("neon", "armv8.2-a+dotprod", "asimddp"),
    InstructionSet("generic", "", frozenset(), ()),
)
"""The last set is the compiler's default, which every processor of the architecture can run."""


def sets_of(machine: str) -> list[InstructionSet]:
    """Return the instruction sets of an architecture, best first.

    machine   the result of `platform.machine()`: systems other than Linux have names of their own
    """
    known = {"amd64": "x86_64", "arm64": "aarch64"}
    name = known.get(machine.lower(), machine)
    return [each for each in INSTRUCTION_SETS if each.machine in ("", name)]
