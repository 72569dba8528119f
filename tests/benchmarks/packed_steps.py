"""Measures the loading of one model, or the steps of two. packed_models.py starts this program.

    python -m tests.benchmarks.packed_steps load FILE
    python -m tests.benchmarks.packed_steps steps FILE FILE SECONDS

Prints one line of JSON. Imports only what a worker imports, because it measures its own memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from protocol.config.worker import WorkerConfig
from tests.support.paged import PagedRow, attention_batch
from worker.attention.select import select_attention
from worker.device.cpuinfo import cpu_flags
from worker.kernels.number_types import number_types
from worker.kernels.select import select_kernels
from worker.kv.cache import KVCache
from worker.loading.decoder import LoadedModel, load_model
from worker.models.base import RowModel

CPU = torch.device("cpu")
ROWS = (1, 8, 32)
CONTEXT, BLOCK_TOKENS = 128, 16
MIN_PAIRS = 5


def load(path: Path) -> LoadedModel:
    flags = cpu_flags()
    kernels = select_kernels("auto", CPU, cpu_flags=flags)
    types = number_types(WorkerConfig(model=""), is_gpu=False, cpu_flags=flags)
    return load_model(
        path,
        dtype=getattr(torch, types.dtype),
        device=CPU,
        kernels=kernels,
        weights="packed",
        rounds_floats=types.rounds_floats,
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_loading(path: Path) -> dict[str, Any]:
    """Return the resident bytes before and after loading, the bytes of the weights, the seconds,
    and the names of the kernels and of the dtype."""
    before, start = resident_bytes(), time.perf_counter()
    loaded = load(path)
    seconds = time.perf_counter() - start
    return {
        "before": before,
        "after": resident_bytes(),
        "weights": loaded.card.weights_bytes,
        "seconds": seconds,
        "kernels": loaded.model.kernels.name,
        "dtype": loaded.card.dtype,
    }


@dataclass
class DecodeStep:
    """A decode step of `rows` requests after CONTEXT - 1 tokens, which can be repeated."""

    loaded: LoadedModel
    rows: int

    def __post_init__(self) -> None:
        spec, dtype = self.loaded.spec, getattr(torch, self.loaded.card.dtype)
        blocks = CONTEXT // BLOCK_TOKENS
        sizes = (spec.num_layers, 1 + self.rows * blocks, BLOCK_TOKENS, spec.layer_heads[0].count)
        self.cache = KVCache(*sizes, spec.layer_heads[0].dim, dtype, CPU)
        self.ids = torch.arange(3, 3 + self.rows)
        rows = [
            PagedRow(CONTEXT - 1, 1, range(1 + row * blocks, 1 + (row + 1) * blocks))
            for row in range(self.rows)
        ]
        self.batch = attention_batch(rows, BLOCK_TOKENS)
        kernels = self.loaded.model.kernels
        self.attention = select_attention(BLOCK_TOKENS, dtype=dtype, kernels=kernels)

    def seconds(self) -> float:
        """Compute the step, and return its time."""
        start = time.perf_counter()
        model = self.loaded.model
        assert not isinstance(model, RowModel)
        model.logits(model(self.ids, self.batch, self.cache, self.attention))
        return time.perf_counter() - start


def measure_steps(base: Path, other: Path, seconds: float) -> list[dict[str, Any]]:
    """Time the decode steps of two models alternately. For each number of rows, return the median
    seconds of both models, and the number and the median ratio of the pairs of steps.

    seconds   measuring time per number of rows; at least MIN_PAIRS pairs are measured
    """
    models, found = (load(base), load(other)), []
    for rows in ROWS:
        steps = [DecodeStep(model, rows) for model in models]
        times: list[tuple[float, ...]] = []
        for step in steps:
            step.seconds()
        end = time.perf_counter() + seconds
        while len(times) < MIN_PAIRS or time.perf_counter() < end:
            first = len(times) % 2
            pair = [0.0, 0.0]
            for index in (first, 1 - first):
                pair[index] = steps[index].seconds()
            times.append(tuple(pair))
        found.append(
            {
                "rows": rows,
                "base": median(one for one, _ in times),
                "other": median(two for _, two in times),
                "ratio": median(two / one for one, two in times),
                "pairs": len(times),
            }
        )
    return found


def main(job: str, arguments: Sequence[str]) -> None:
    if job == "load":
        result: Any = measure_loading(Path(arguments[0]))
    else:
        result = measure_steps(Path(arguments[0]), Path(arguments[1]), float(arguments[2]))
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
