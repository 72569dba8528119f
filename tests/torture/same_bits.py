"""Computes many prompts in every way, and compares the bits with those of each prompt alone.

    python -m tests.torture.same_bits [--prompts 16] [--models default Q4_K] [--ways "disk tier"]
                                      [--kernels avx2]

The models are the default model, a small random one in several types of weights, and small random
ones with recurrent layers or with shared keys and values, each in both dtypes. The ways are those
of tests/support/same_bits.py: chunks of any length, other requests in
the batch, other threads, cached prefixes at each boundary between blocks, preemptions at each step,
drafts, K/V from another engine and from tiers. A progress bar shows the answers; the table at the
end has a row for each model and way, and a line for each answer with other bits. The exit code is 1
if there is one. `make torture` runs all; with 200 prompts this takes hours, so `--prompts 16` is
for use after a change of the kernels.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from tests.support.kernels import NAMES, native_kernels
from tests.support.model import smollm2_gguf
from tests.support.replica import load
from tests.support.same_bits import DENSE, OF_LAYERS, WAYS, BitCase, Subject, small_model, ways_for
from tests.torture.table import print_table
from worker.loading.decoder import LoadedModel

DEFAULT = "default"
QUANTIZED = ("Q4_1", "Q4_1-int8", "Q8_0", "Q8_0-int8", "Q4_K", "Q4_K-int8", "Q4_1-kv8")
MODELS = (DEFAULT, *QUANTIZED, DENSE, *OF_LAYERS)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COLUMNS = {"model": 12, "dtype": 10, "way": 24, "answers": 8, "other bits": 0}


@dataclass
class BitRow:
    """The answers of one model that were computed in one way.

    failure   why the way did not complete; "" if it did
    """

    model: str
    dtype: str
    way: str
    num_cases: int = 0
    differing: list[BitCase] = field(default_factory=list)
    failure: str = ""

    def cells(self) -> tuple[str, ...]:
        return self.model, self.dtype, self.way, str(self.num_cases), str(len(self.differing))

    def complaints(self, slack: float) -> list[str]:
        found = [
            f"prompt {case.prompt}"
            + (f", {self.way} {case.parameter}" if case.parameter is not None else "")
            for case in self.differing
        ]
        return found + [self.failure] * bool(self.failure)


def load_model(
    model: str, dtype: torch.dtype, folder: Path, instructions: str | None
) -> LoadedModel:
    if model == DEFAULT:
        kernels = native_kernels(instructions)
        return load(smollm2_gguf(), dtype, kernels=kernels, weights="packed")
    return small_model(folder, model, dtype, instructions)


def compare(
    models: Sequence[str],
    dtypes: Sequence[str],
    ways: Sequence[str],
    num_prompts: int,
    instructions: str | None,
) -> Iterator[BitRow]:
    """Compute the prompts of each model in each dtype and way. Yield a row for each combination.

    instructions   instruction set of the kernels; None: the best one
    """
    for model in models:
        for dtype in dtypes:
            with tempfile.TemporaryDirectory(prefix="tidegate-bits-") as folder:
                loaded = load_model(model, DTYPES[dtype], Path(folder), instructions)
                subject = Subject.of(loaded, num_prompts)
                for way in ways_for(loaded, ways):
                    yield compare_way(BitRow(model, dtype, way), subject)


def compare_way(row: BitRow, subject: Subject) -> BitRow:
    """Compute the subject's prompts in the way of `row`. Fill in and return `row`."""
    title = f"{row.model} {row.dtype}, {row.way}"
    with tempfile.TemporaryDirectory(prefix="tidegate-bits-") as folder:
        cases = WAYS[row.way](subject, Path(folder))
        try:
            for case in tqdm(cases, title, unit=" answers", leave=False):
                row.num_cases += 1
                if not subject.is_same(case):
                    row.differing.append(case)
        except AssertionError as error:
            row.failure = f"not computed in this way: {error or 'see the checks of this way'}"
    return row


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.same_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=int, default=200, help="prompts per model (default 200)")
    for name, choices in {"models": MODELS, "dtypes": DTYPES, "ways": WAYS}.items():
        known = [*choices]
        parser.add_argument(
            f"--{name}", nargs="+", choices=known, default=known, metavar=name[:-1].upper(),
            help=f"some of: {', '.join(known)} (default: all)",
        )  # fmt: skip
    parser.add_argument(
        "--kernels", choices=NAMES, help="instruction set of the kernels (default: the best one)"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # two would wait for each other on a busy machine
    rows = []
    chosen = (options.models, options.dtypes, options.ways, options.prompts, options.kernels)
    for row in compare(*chosen):
        tqdm.write(f"done: {', '.join(row.cells())}", file=sys.stderr)
        rows.append(row)
    return print_table(COLUMNS, rows, 1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
