"""Estimates the cycles of the kernels' inner loops on ARM processors, without one.

    python -m tests.benchmarks.instruction_costs [--compiler clang++-19] [--rows 1,6]

The loop over the groups of a panel is compiled for each set, and llvm-mca simulates it for each
processor. The table has cycles per 1,024 weights and row, all in the first-level cache: an estimate
of what the instructions allow, not of a step. What is computed once for a span of groups, such as
the factors of Q4_K's scales, is not counted. It needs
aarch64-linux-gnu-g++, or the compiler that is named, and llvm-mca. Versions before 16 have one
model, of a Cortex-A57, for all processors but Apple's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.emulated import CSRC
from tools.bench.report import aligned
from worker.kernels.instruction_sets import InstructionSet, sets_of

FORMATS = {"Q4_K": "Q4K", "Q8_0": "Q8"}
PROCESSORS = {  # processor of llvm-mca -> its best set
    "cortex-a76": "neon",
    "neoverse-n1": "neon",
    "apple-m1": "neon",
    "neoverse-v1": "i8mm",
}
SOURCE = """#include "integer_tiles.h"
extern "C" void tile(const IntegerTile &tile) {{
    multiply_groups<{rows}, GroupInPlace<{format}>>(tile);
}}
"""
OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-w", "-S")
PRODUCT = re.compile(r"\b(sdot|smmla)\b")
PRODUCTS_OF = {"sdot": 16, "smmla": 32}
LABEL = re.compile(r"^(\.\w+):")
BRANCH = re.compile(r"\s(?:b|b\.?\w\w|cbn?z|tbn?z)\s.*?(\.\w+)$")
COLUMNS = ("format", "rows", *PROCESSORS)


def assembly(compiler: str, instructions: InstructionSet, fmt: str, rows: int) -> str:
    """Return the code of a tile."""
    with tempfile.TemporaryDirectory(prefix="tidegate-costs-") as folder:
        source = Path(folder, "tile.cpp")
        source.write_text(SOURCE.format(rows=rows, format=fmt))
        command = [*compiler.split(), *OPTIONS, *instructions.options, f"-I{CSRC}"]
        subprocess.run([*command, str(source), "-o", f"{source}.s"], check=True)
        return Path(f"{source}.s").read_text()


def loop_of(code: str) -> list[str]:
    """Return the shortest loop with the most products. Raises ValueError if no loop has any."""
    lines = [line.partition("//")[0].rstrip() for line in code.splitlines()]
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    products = [bool(PRODUCT.search(line)) for line in lines]
    loops = []
    for end, line in enumerate(lines):
        found = BRANCH.search(line)
        start = labels.get(found[1], end) if found else end
        if start < end and (count := sum(products[start:end])):
            loops.append((-count, end - start, lines[start : end + 1]))
    if not loops:
        raise ValueError("the code has no loop with products")
    return min(loops)[2]


def cycles(mca: str, loop: Sequence[str], processor: str) -> float:
    """Return the cycles that a pass of the loop takes, on average of many."""
    command = [mca, "-mtriple=aarch64", f"-mcpu={processor}", "-iterations=100"]
    instructions = [line for line in loop if line.startswith("\t") and not line.startswith("\t.")]
    done = subprocess.run(
        command, input="\n".join(instructions), capture_output=True, text=True, check=True
    )
    found = re.search(r"^Total Cycles: +(\d+)", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return int(found[1]) / 100


def products(loop: Sequence[str]) -> int:
    """Return the products of numbers of x and weights that a pass of the loop computes."""
    return sum(PRODUCTS_OF[found[1]] for line in loop if (found := PRODUCT.search(line)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.instruction_costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--compiler", default="aarch64-linux-gnu-g++")
    parser.add_argument("--mca", default="llvm-mca", help="the simulator")
    parser.add_argument("--rows", default="1,6", help="rows of a tile, from 1 to 6")
    options = parser.parse_args(arguments)
    sets = {each.name: each for each in sets_of("aarch64")}
    table: list[tuple[str, ...]] = [COLUMNS]
    for name, fmt in FORMATS.items():
        for rows in map(int, options.rows.split(",")):
            loops = {
                each: loop_of(assembly(options.compiler, sets[each], fmt, rows))
                for each in sorted(set(PROCESSORS.values()))
            }
            found = []
            for processor, each in PROCESSORS.items():
                loop = loops[each]
                share = products(loop) / 1024
                found.append(f"{cycles(options.mca, loop, processor) / share:.0f}")
            table.append((name, str(rows), *found))
    print(aligned(table))


if __name__ == "__main__":
    main()
