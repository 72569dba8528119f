"""Computes the golden numbers of `avxvnni` with AVX-512's encoding of its instruction.

    python -m tests.torture.evex [TEST ...]

AVX-VNNI's instruction vpdpbusd is encoded as VEX. Processors with AVX-512 VNNI and VL have it on
the same registers, encoded as EVEX. So the set is compiled to assembly, in which `{vex}` before
each vpdpbusd becomes `{evex}`. The two libraries are disassembled, to show that nothing else
differs. Then `tests/unit/test_kernel_bits.py` runs with the second one, or other tests for which
the set is a parameter. This takes half a minute, and g++ and objdump.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.emulated import CSRC, GOLDEN_TEST, OPTIONS, ROOT, EmulatedProcessor
from worker.device.cpuinfo import cpu_flags
from worker.kernels.instruction_sets import INSTRUCTION_SETS

NAME = "avxvnni"
NEEDS = frozenset({"avx512_vnni", "avx512vl"})
MARKED = re.compile(r"\{vex\}(?=\s+vpdpbusd\s)")
PADDING = re.compile(r"(data16 |cs )*nop|xchg\s+%ax,%ax$")
"""Instructions without effect, by which assemblers align loops."""
PLACE = re.compile(r"-?(0x)?[0-9a-f]+(?=\(%rip\))|\b[0-9a-f]+ <[^>]*>|\s*# .*")
"""Addresses and distances, which depend on the lengths of other instructions. What they stand for
is the same, because both libraries are assembled from one text."""


def compiled(folder: Path) -> dict[str, Path]:
    """Compile the set into `folder` in both encodings. Return encoding -> library."""
    (options,) = (each.options for each in INSTRUCTION_SETS if each.name == NAME)
    source = folder / "vex.s"
    command = ["c++", *OPTIONS, *options, str(CSRC / "kernels.cpp"), "-S", "-o", str(source)]
    subprocess.run(command, check=True)
    text, count = MARKED.subn("{evex}", source.read_text())
    if not count:
        raise SystemExit(f"The compiler marks no vpdpbusd with {{vex}} in {source}")
    print(f"{count:,} instructions vpdpbusd have another encoding", flush=True)
    (folder / "evex.s").write_text(text)
    libraries = {"vex": folder / "vex.so", "evex": folder / f"_{NAME}{EXTENSION_SUFFIXES[0]}"}
    for encoding, library in libraries.items():
        assembly = folder / f"{encoding}.s"
        subprocess.run(["c++", "-shared", str(assembly), "-o", str(library)], check=True)
    return libraries


def instructions(disassembly: str) -> Iterator[str]:
    """Yield the instructions of objdump's output, without encodings, places and padding."""
    for line in disassembly.splitlines():
        _, tab, found = line.partition(":\t")
        if tab and not PADDING.match(found):
            yield PLACE.sub("", found).replace("{evex} ", "").replace("{vex} ", "").strip()


def first_difference(one: str, other: str) -> str:
    """Return the first instruction that differs between two outputs of objdump; "" if none does."""
    pairs = zip_longest(instructions(one), instructions(other), fillvalue="the end")
    return next((f"{left!r} and {right!r}" for left, right in pairs if left != right), "")


def disassembled(library: Path) -> str:
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.evex",
        description="Compute the golden numbers of avxvnni with AVX-512's form of its instruction.",
    )
    parser.add_argument("tests", nargs="*", metavar="TEST", help=f"default: {GOLDEN_TEST}")
    given = parser.parse_args()
    if not cpu_flags() >= NEEDS:
        print("This processor lacks AVX-512 VNNI or VL; nothing was run.")
        return 0
    with tempfile.TemporaryDirectory(prefix="tidegate-evex-") as folder:
        libraries = compiled(Path(folder))
        one, other = (disassembled(library) for library in libraries.values())
        if difference := first_difference(one, other):
            print(f"The libraries differ in more than the encoding: {difference}")
            return 1
        print(f"{sum(1 for _ in instructions(one)):,} instructions are the same", flush=True)
        tests = given.tests or [str(ROOT / GOLDEN_TEST)]
        plugin = EmulatedProcessor(Path(folder))
        return pytest.main(["-q", "-rs", "-k", NAME, *tests], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main())
