"""Compares the steps of workers with two sets of options, in turns.

    python -m tests.benchmarks.paired_steps '{"activations": "int8"}' '{}'
    python -m tests.benchmarks.paired_steps '{"kv_dtype": "int8"}' '{}' --batch 1,8 --context 2048
    python -m tests.benchmarks.paired_steps '{}' '{}' --sampling penalised,greedy

The arguments are fields of WorkerConfig as JSON. `--sampling` is one method for both sides, or one
for each. Each turn starts a worker with the first set,
times every kind of step, and does the same with the second set. The table has the best step of
each side, and the median over the turns of the ratio first/second of the median steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
from tqdm import tqdm

from protocol.config.worker import WorkerConfig
from protocol.tools.bench import StepBench, StepTiming
from tests.support.model import smollm2_gguf
from tools.bench.report import aligned
from tools.commands.bench_step import measure

COLUMNS = ("context", "new tokens", "batch", "first, ms", "second, ms", "ratio")


def workload(fields: dict[str, Any], sampling: str, options: argparse.Namespace) -> StepBench:
    """Return the steps to time with a worker that has these fields of WorkerConfig."""
    model = {"model": options.model or str(smollm2_gguf()), "threads": options.threads}
    worker = msgspec.convert({**model, **fields}, WorkerConfig)
    fields = {name: getattr(options, name) for name in ("batch", "context", "new_tokens", "steps")}
    return msgspec.convert({"worker": worker, "sampling": sampling, **fields}, StepBench)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.paired_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=json.loads, help="fields of WorkerConfig, as JSON")
    parser.add_argument("second", type=json.loads, help="the same for the second worker")
    parser.add_argument("--model", default="", help="directory or GGUF file; default: SmolLM2")
    parser.add_argument("--batch", type=numbers, default=(1, 8, 32, 64))
    parser.add_argument("--context", type=numbers, default=(256,))
    parser.add_argument("--new-tokens", type=int, default=1, help="more than 1: prefill")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each kind in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sampling", default="greedy", help="as of bench step; A or A,B")
    options = parser.parse_args(arguments)
    methods = (options.sampling.split(",") * 2)[:2]
    sides = [
        workload(fields, sampling, options)
        for fields, sampling in zip((options.first, options.second), methods, strict=True)
    ]
    turns = [[timings(side) for side in sides] for _ in tqdm(range(options.turns), unit="turn")]
    rows: list[Sequence[str]] = [COLUMNS]
    for pairs in zip(*(zip(*turn, strict=True) for turn in turns), strict=True):
        first, second = (min(pair[side].best_s for pair in pairs) * 1e3 for side in (0, 1))
        ratio = median(one.step_s / other.step_s for one, other in pairs)
        kind = pairs[0][0]
        cells = (kind.context, kind.new_tokens, kind.batch, f"{first:.2f}", f"{second:.2f}")
        rows.append((*map(str, cells), f"{ratio:.3f}"))
    print(aligned(rows))


def timings(config: StepBench) -> list[StepTiming]:
    """Start a worker and time each kind of step."""
    return [line for line in measure(config) if isinstance(line, StepTiming)]


if __name__ == "__main__":
    main()
