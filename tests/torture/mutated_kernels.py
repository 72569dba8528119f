"""Proves that the tests of the same bits find a kernel that sums in another order.

    python -m tests.torture.mutated_kernels [--only "prefill scores"]

Many mutations put one kernel back to an order of sums that depends on how a position is computed.
The kernels are compiled with it in a temporary folder, for the best instruction set of this
machine, and tests/differential/test_same_bits.py runs on them, for small models. It must fail.
Other mutations change the order in the same way for all positions: with these, the golden numbers
of tests/unit/test_kernel_bits.py must differ. Both tests must pass on the unchanged source, which
is compiled in the same way. The command prints a row for each mutation, and exits with 1 if there
is a complaint. Mutations of code that this processor cannot run are left out. It takes minutes, and
needs a C++ compiler.
`tests/unit/test_mutated_kernels.py` checks that each text is still in the source.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.emulated import CSRC, OPTIONS, ROOT
from tests.torture.table import print_table
from worker.device.cpuinfo import cpu_flags
from worker.kernels import library

TEST = "tests/differential/test_same_bits.py"
FILTER = "weights_of_every_kind and {dtype}"
GOLDEN_TEST = "tests/unit/test_kernel_bits.py"
GOLDEN_FILTER = "golden_ones"
"""The test of the golden numbers, for mutations that only they show."""
PASSED, FAILED = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED
COLUMNS = {"mutation": 44, "test": 0}


@dataclass(frozen=True)
class Mutation:
    """A change of one file of csrc.

    changes   pairs of a text, which occurs once, and its replacement
    dtype     dtype of the models that the test computes
    needs     features of the processor without which the changed code is not compiled
    is_golden whether the test is that of the golden numbers: every way to compute a position has
              the changed order
    """

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    dtype: str = "float32"
    needs: frozenset[str] = frozenset()
    is_golden: bool = False

    @property
    def tests(self) -> tuple[str, ...]:
        """Return pytest's arguments for the test that must fail."""
        if self.is_golden:
            return GOLDEN_TEST, "-k", GOLDEN_FILTER
        return TEST, "-k", FILTER.format(dtype=self.dtype)

    def apply(self, folder: Path) -> None:
        """Change the copy of csrc in `folder`. Raises ValueError unless each text occurs once."""
        path = folder / self.file
        source = path.read_text()
        for before, after in self.changes:
            if source.count(before) != 1:
                raise ValueError(f"{self.name}: {self.file} does not have once: {before}")
            source = source.replace(before, after)
        path.write_text(source)


MUTATIONS = (
    Mutation("none", "kernels.cpp", ()),
    Mutation("none, in bfloat16", "kernels.cpp", (), dtype="bfloat16"),
    Mutation("none, golden numbers", "kernels.cpp", (), is_golden=True),
    Mutation(
        "prefill scores: dimensions one by one",
        "key_tile.h",
        (
            ("if constexpr (LEVEL < NUM_SUM_BITS) {", "if constexpr (LEVEL < 0) {"),
            (
                "int64_t w = LANE; w < dim / By::COLUMNS; w += SUMS",
                "int64_t w = 0; w < dim / By::COLUMNS; w++",
            ),
        ),
    ),
    Mutation(
        "prefill: all keys in one piece",
        "prefill.h",
        (("if (tile % PIECE == 0) end_piece(s, queries, dim);", ""),),
    ),
    Mutation(
        "decode scores: the last dimensions first",
        "key_tile.h",
        (
            (
                "for (int64_t d = 0; d < dim; d += Dots<N>::WIDTH) {",
                "for (int64_t d = dim - Dots<N>::WIDTH; d >= 0; d -= Dots<N>::WIDTH) {",
            ),
        ),
    ),
    Mutation(
        "decode values: the second half of a tile first",
        "attention.h",
        (
            (
                "add_values<Q, N>(scores, tile.values, tile.first, tile.count, dim, floats + g * "
                "dim);",
                "const int64_t half = (tile.first + tile.count) / 2;\n"
                "    float *own = floats + g * dim;\n"
                "    add_values<Q, N>(scores, tile.values, half, tile.count, dim, own);\n"
                "    add_values<Q, N>(scores, tile.values, tile.first, half, dim, own);",
            ),
        ),
    ),
    Mutation(
        "linears of many rows: the last columns first",
        "float_tiles.h",
        (
            (
                "#pragma GCC unroll 4\n        for (int k = 0; k < COUNT; k += By::COLUMNS)",
                "#pragma GCC unroll 4\n"
                "        for (int k = COUNT - By::COLUMNS; k >= 0; k -= By::COLUMNS)",
            ),
        ),
    ),
    Mutation(
        "linears in pairs of many rows: the last columns first",
        "pair_rows.h",
        (
            (
                "for (int p = 0; p < GROUP / 2; p++)\n",
                "for (int i = 0, p; "
                "i < GROUP / 2 && (p = ROWS > 2 ? GROUP / 2 - 1 - i : i, true); i++)\n",
            ),
        ),
        dtype="bfloat16",
        needs=frozenset({"avx512_bf16"}),
    ),
    Mutation(
        "linears in integers of many rows: the last groups first",
        "integer_tiles.h",
        (
            (
                "const Scales scales(group, o);",
                "const Scales scales(group, o);\n            const int64_t first = g;",
            ),
            (
                "multiply_group<ROWS>(x, at, offset, group, scales, sums);",
                "const int64_t other = ROWS > 1 ? first + end - 1 - g : g;\n"
                "                int64_t places[ROWS];\n"
                "                for (int m = 0; m < ROWS; m++) places[m] = at[m] + other - g;\n"
                "                multiply_group<ROWS>(x, places, offset,\n"
                "                    ROWS > 1 ? G(run, other) : group, scales, sums);",
            ),
        ),
    ),
    Mutation(
        "remainders of several rows: only the first refined group",
        "linear.h",
        (
            (
                "for (const RefinedOrder::Group &each : s.order.groups) {",
                "for (const RefinedOrder::Group &each : s.order.groups) {\n"
                "        if (count > 1 && &each > &s.order.groups[0]) break;",
            ),
        ),
    ),
    Mutation("unchanged: the golden numbers", "sums.h", (), is_golden=True),
    Mutation(
        "sums: neighbours first",
        "sums.h",
        (
            (
                "return (x[0] + x[2]) + (x[1] + x[3]);",
                "return (x[0] + x[1]) + (x[2] + x[3]);",
            ),
        ),
        is_golden=True,
    ),
    Mutation(
        "linears in integers: products are rounded before they are added",
        "integer_tiles.h",
        (
            (
                "sum = fused(scale, Sums::floats(whole), sum);",
                "sum += scale * Sums::floats(whole);",
            ),
        ),
        is_golden=True,
    ),
    Mutation(
        "exponential: the last product is rounded before it is added",
        "functions.h",
        (("p = fused(p * rest, rest, rest) + 1.0f;", "p = p * rest * rest + rest + 1.0f;"),),
        is_golden=True,
    ),
    Mutation(
        "convolutions: the latest token first",
        "convolution.h",
        (
            (
                "for (int64_t tap = 0; tap < conv.kernel; tap++) {",
                "for (int64_t tap = conv.kernel - 1; tap >= 0; tap--) {",
            ),
        ),
        is_golden=True,
    ),
    Mutation(
        "gated delta: products are rounded before they are added",
        "gated_delta.h",
        (("result[j] = fused(x, query, result[j]);", "result[j] += x * query;"),),
        is_golden=True,
    ),
    Mutation(
        "Mamba 1: the input is rounded before it is added",
        "mamba1.h",
        (
            (
                "fused(splat(added), load_first(b + j, rest), load_first(s + j, rest) * factor);",
                "splat(added) * load_first(b + j, rest) + load_first(s + j, rest) * factor;",
            ),
        ),
        is_golden=True,
    ),
    Mutation(
        "Mamba 2: the last columns first",
        "mamba2.h",
        (
            (
                "for (int64_t i = 0; i < size; i += SUMS)",
                "for (int64_t i = size - SUMS; i >= 0; i -= SUMS)",
            ),
        ),
        is_golden=True,
    ),
    Mutation(
        "RG-LRU: the decayed state is rounded before it is added",
        "rg_lru.h",
        (
            (
                "return fused(exponential(log), s, square_root(",
                "return fused(splat(1.0f), exponential(log) * s, square_root(",
            ),
        ),
        is_golden=True,
    ),
    Mutation(
        "adapters: the last row of a whole vector of outputs first",
        "low_rank.h",
        (
            (
                "for (int64_t j = 0; j < part.rank; j++) total = fused(",
                "for (int64_t j = part.rank - 1; j >= 0; j--) total = fused(",
            ),
        ),
        is_golden=True,
    ),
    Mutation(
        "index scores: products are rounded before they are added",
        "index_scores.h",
        (
            (
                "fused(max_of(load(own + j), Floats{}), splat(weights[head + m]), load(sums + j))",
                "max_of(load(own + j), Floats{}) * splat(weights[head + m]) + load(sums + j)",
            ),
        ),
        is_golden=True,
    ),
    Mutation(
        "routing: the last expert first",
        "routing.h",
        (
            (
                "for (int64_t e = 0; e < experts; e++) total +=",
                "for (int64_t e = experts - 1; e >= 0; e--) total +=",
            ),
        ),
        is_golden=True,
    ),
)


@dataclass(frozen=True)
class MutationRow:
    """The outcome of the test with one mutation: pytest's exit code, and the end of its output."""

    mutation: Mutation
    code: int
    output: str

    def cells(self) -> tuple[str, ...]:
        outcome = {PASSED: "passes", FAILED: "fails"}.get(pytest.ExitCode(self.code), "is broken")
        return self.mutation.name, outcome

    def complaints(self, slack: float) -> list[str]:
        wanted = FAILED if self.mutation.changes else PASSED
        return [] if self.code == wanted else [f"the test {self.cells()[1]}: {self.output}"]


class KernelFolder:
    """A pytest plugin that loads the compiled kernels from `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pytest_configure(self) -> None:
        library.FOLDER = self._folder


def build(mutation: Mutation, folder: Path) -> None:
    """Compile the mutated kernels into `folder`, for the best instruction set of this machine."""
    source = folder / "csrc"
    shutil.copytree(CSRC, source)
    mutation.apply(source)
    best = library.runnable(cpu_flags())[0]
    target = folder / f"_{best.name}{EXTENSION_SUFFIXES[0]}"
    command = ["c++", *OPTIONS, *best.options, str(source / "kernels.cpp"), "-o", str(target)]
    subprocess.run(command, check=True)


def outcomes(mutations: list[Mutation]) -> Iterator[MutationRow]:
    """Compile and test each mutation, and yield its row."""
    for mutation in mutations:
        with tempfile.TemporaryDirectory(prefix="tidegate-mutated-") as folder:
            try:
                build(mutation, Path(folder))
            except ValueError as error:
                yield MutationRow(mutation, pytest.ExitCode.INTERNAL_ERROR, str(error))
                continue
            command = [sys.executable, "-m", "tests.torture.mutated_kernels", "--test", folder]
            command += ["--mutation", mutation.name]
            ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            yield MutationRow(mutation, ran.returncode, ran.stdout.strip()[-400:])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.mutated_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="mutations whose name contains this text")
    parser.add_argument("--test", help=argparse.SUPPRESS)
    parser.add_argument("--mutation", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.test:
        (mutation,) = (each for each in MUTATIONS if each.name == options.mutation)
        return pytest.main(
            ["-q", "-p", "no:cacheprovider", *mutation.tests], [KernelFolder(Path(options.test))]
        )
    flags = cpu_flags()
    chosen = [each for each in MUTATIONS if options.only in each.name and each.needs <= flags]
    return print_table(COLUMNS, outcomes(chosen), 1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
