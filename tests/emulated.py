"""Runs the tests of the AVX-512 kernels on a processor without AVX-512.

The kernels for AVX-512 are compiled for AVX2, with intrinsics that are computed lane by lane
(tests/support/avx512_emulation.h). This takes a minute and a C++ compiler, so `make test` does not
do it. Run it after a change of worker/kernels/csrc:

    python -m tests.emulated
    python -m tests.emulated tests/unit/test_kernels.py -k avx512bf16
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "worker" / "kernels" / "csrc"
HEADER = ROOT / "tests" / "support" / "avx512_emulation.h"
OPTIONS = (
    *("-std=c++17", "-O2", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden"),
    *("-fPIC", "-shared"),
)
WARNINGS = ("-Wno-psabi",)  # vectors of 64 bytes are passed in memory
MACROS = ("F", "BW", "DQ", "VL")
GOLDEN_TEST = "tests/unit/test_kernel_bits.py::test_results_are_the_golden_ones"
TESTS = (
    "tests/unit/test_attention.py",
    "tests/unit/test_decode.py",
    "tests/unit/test_integer_kernels.py",
    "tests/unit/test_kernels.py",
    "tests/unit/test_native_llama.py",
    "tests/unit/test_recurrent_kernels.py",
    "tests/unit/test_whole_step.py",
)


def build(folder: Path) -> None:
    """Compile a library for each AVX-512 instruction set into `folder`."""
    from worker.kernels.instruction_sets import INSTRUCTION_SETS

    by_name = {each.name: each for each in INSTRUCTION_SETS}
    for name, macros in {"avx512": MACROS, "avx512bf16": (*MACROS, "BF16", "VNNI")}.items():
        print(f"== Compiling {name}, emulated", flush=True)
        defined = folder / f"{name}.h"
        lines = [f'#include "{HEADER}"', *(f"#define __AVX512{macro}__ 1" for macro in macros)]
        defined.write_text("\n".join(lines) + "\n")
        target = folder / f"_{name}{EXTENSION_SUFFIXES[0]}"
        command = ["c++", *OPTIONS, *WARNINGS, *by_name["avx2"].options, "-include", str(defined)]
        subprocess.run([*command, str(CSRC / "kernels.cpp"), "-o", str(target)], check=True)


class EmulatedProcessor:
    """A pytest plugin. The tests load the libraries in `folder`, and find a processor that can run
    all instruction sets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pytest_configure(self) -> None:
        from worker.device import cpuinfo
        from worker.kernels import library
        from worker.kernels.instruction_sets import INSTRUCTION_SETS

        library.FOLDER = self._folder
        flags = cpuinfo.cpu_flags().union(*(each.needs for each in INSTRUCTION_SETS))
        cpuinfo.cpu_flags = lambda *_: flags


def main(arguments: Sequence[str]) -> int:
    names_a_test = any((ROOT / each.partition("::")[0]).exists() for each in arguments)
    tests = [] if names_a_test else ["-k", "avx512", *(str(ROOT / test) for test in TESTS)]
    with tempfile.TemporaryDirectory(prefix="tidegate-emulated-") as folder:
        build(Path(folder))
        return pytest.main(["-q", *tests, *arguments], plugins=[EmulatedProcessor(Path(folder))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
