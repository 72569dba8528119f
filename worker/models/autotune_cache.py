"""Measures the linears of one layer with packed and with dense weights, and caches the times.

A server measures for a few tenths of a second at its first start, and reads the times from a file
at later starts (measurements.py).

Times are CPU times of all threads. Wall-clock times can be a hundred times too large if other
processes use the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch import Tensor

from worker.device.measurements import stored_or_measured
from worker.layers.linear import Linear
from worker.models.autotune import RowTime

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LEAST_TURNS, MOST_TURNS = 2, 5
BUDGET_S = 0.3
"""Time for all measurements. Each number of rows gets an equal share and is measured LEAST_TURNS to
MOST_TURNS times."""
COLD_ROWS = 32
"""For at most this many rows, times are measured without any of the weights in the CPU's caches."""
COLD_BYTES = 1 << 26
"""Bytes of other data that are written before such a measurement, to evict the weights."""


def row_times(
    of: Sequence[str],
    packed: Sequence[Linear],
    read_dense: Callable[[], Sequence[Linear]] | None,
    inputs: Sequence[Tensor],
    folder: Path | None,
) -> list[RowTime]:
    """Return the times of a layer's linears for each number of rows in ROWS. They are read from the
    cache; if it has no valid file, they are measured and the file is written.

    of           everything that the times depend on
    packed       the layer's linears with packed weights
    read_dense   returns the same linears with dense weights; called only to measure. None: only
                 packed weights are measured
    inputs       [max(ROWS), in] for each linear
    folder       directory of the files; None disables the cache
    """
    table, _ = stored_or_measured(
        folder,
        ["linears of a step", *of],
        list[RowTime],
        lambda: measure(packed, read_dense() if read_dense is not None else None, inputs),
        lambda table: tuple(time.rows for time in table) == ROWS,
    )
    return table


@torch.inference_mode()
def measure(
    packed: Sequence[Linear], dense: Sequence[Linear] | None, inputs: Sequence[Tensor]
) -> list[RowTime]:
    """Measure the linears, and return one RowTime for each number of rows in ROWS: the shortest
    time of each form of the weights. A time is that of all linears together, in CPU seconds of all
    threads divided by the number of threads.

    dense    None: only `packed` is measured
    inputs   [max(ROWS), in] for each linear

    The forms are measured alternately, so that a disturbance affects both.
    """
    forms = [packed] if dense is None else [packed, dense]
    other = torch.zeros(COLD_BYTES, dtype=torch.uint8)
    table = []
    for rows in ROWS:
        parts = [each[:rows] for each in inputs]
        cold = other if rows <= COLD_ROWS else other[:0]
        until = perf_counter() + BUDGET_S / len(ROWS)
        took: list[list[float]] = []
        while len(took) < LEAST_TURNS or (len(took) < MOST_TURNS and perf_counter() < until):
            took.append([_seconds(form, parts, cold) for form in forms])
        best = [min(times) for times in zip(*took, strict=True)]
        table.append(RowTime(rows, best[0], best[1] if dense is not None else None))
    return table


def example_input(width: int, dtype: torch.dtype) -> Tensor:
    """Return an input [max(ROWS), width] of a linear, whose values do not repeat.

    They are not random, because `torch.Generator` needs the postponed part of torch.
    """
    return torch.arange(max(ROWS) * width).sin().view(max(ROWS), width).to(dtype)


def _seconds(linears: Sequence[Linear], inputs: Sequence[Tensor], cold: Tensor) -> float:
    """Return the CPU seconds of the linears, divided by the number of threads."""
    cold.add_(1)
    started = process_time()
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)
    return (process_time() - started) / torch.get_num_threads()
