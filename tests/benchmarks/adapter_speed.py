"""Times decode steps and prompts with LoRA adapters, beside those of the model alone.

    python -m tests.benchmarks.adapter_speed [--model FILE] [--rank 16] [--rows 8] [--tokens 128]

The variants take turns, step by step, so that a busy machine slows all of them down alike. With
--cpu-time one thread computes, and its CPU time counts, which other programs hardly change. Each
variant computes the same positions of the same requests:

    base          no request has an adapter, and none is loaded
    loaded        no request has an adapter, but eight are loaded
    one adapter   all requests have the same adapter
    eight         the requests have eight adapters in turn
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, thread_time

import torch

from protocol.worker.steps import NO_ADAPTER, StepPlan
from tests.support.adapters import random_adapter
from tests.support.kernels import native_kernels
from tests.support.model import smollm2_gguf
from tests.support.plans import slot_init, step_plan
from tests.support.replica import load, new_cache, new_runner, slot_table
from worker.loading.decoder import LoadedModel
from worker.lora.adapter import Adapter
from worker.step.runner import Runner

BLOCK_TOKENS = 16
NUM_ADAPTERS = 8
VARIANTS: dict[str, tuple[int, int]] = {
    "base": (0, 0),
    "loaded": (NUM_ADAPTERS, 0),
    "one adapter": (NUM_ADAPTERS, 1),
    "eight": (NUM_ADAPTERS, NUM_ADAPTERS),
}
"""Name -> number of adapters that are loaded, and that requests have."""


def runner_of(
    loaded: LoadedModel, adapters: Sequence[Adapter], used: int, rows: int, tokens: int
) -> Runner:
    """Return a runner whose slots hold requests of `tokens` tokens, with `used` adapters in
    turn."""
    blocks = -(-(tokens + 2) // BLOCK_TOKENS)
    slots = slot_table(blocks * BLOCK_TOKENS, BLOCK_TOKENS, rows, poison=None)
    runner = new_runner(
        loaded, slots, new_cache(loaded, rows * blocks + 1, BLOCK_TOKENS), adapters=adapters
    )
    binds = [
        slot_init(
            row,
            [1 + (7 * row + n) % 90 for n in range(tokens + 1)],
            blocks=range(1 + row * blocks, 1 + (row + 1) * blocks),
            adapter=row % used if used else NO_ADAPTER,
            adapter_generation=1 if used else 0,
        )
        for row in range(rows)
    ]
    runner.step(step_plan(bind=binds, rows=[(row, 0, tokens, False) for row in range(rows)]))
    return runner


def measure(
    runners: dict[str, Runner], plan: StepPlan, steps: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the median milliseconds of a step of each variant."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(steps + 2):
        for name, runner in runners.items():
            started = clock()
            runner.step(plan)
            if number >= 2:  # the first steps warm up
                times[name].append(clock() - started)
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    clock, threads = (thread_time, 1) if options.cpu_time else (perf_counter, options.threads)
    torch.set_num_threads(threads)
    path = options.model or smollm2_gguf()
    dtype = getattr(torch, options.dtype)
    loaded = load(path, dtype, kernels=native_kernels(), weights="packed")
    adapters = [random_adapter(loaded, seed=n, rank=options.rank) for n in range(NUM_ADAPTERS)]
    print(
        f"{path.name}, {options.dtype}, rank {options.rank}, {threads} threads, "
        f"{adapters[0].num_bytes / (1 << 20):.1f} MiB per adapter"
    )
    for what, counts in (("decode", [1, options.rows]), ("prompts", [1])):
        for rows in counts:
            runners = {
                name: runner_of(loaded, adapters[:count], used, rows, options.tokens)
                for name, (count, used) in VARIANTS.items()
            }
            span = (options.tokens, 1) if what == "decode" else (0, options.tokens)
            plan = step_plan(rows=[(row, *span, what == "decode") for row in range(rows)])
            found = measure(runners, plan, options.steps, clock)
            base = found["base"]
            for name, milliseconds in found.items():
                print(
                    f"{what:8} {rows:3} x {span[1]:4} tokens  {name:12} {milliseconds:8.2f} ms "
                    f"{100 * (milliseconds / base - 1):+6.1f} %"
                )


if __name__ == "__main__":
    main()
