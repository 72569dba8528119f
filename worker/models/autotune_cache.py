"""Measures from how many rows dense weights are faster than packed ones, and caches the result.

A server measures one layer for a few tenths of a second at its first start, and reads the table
from a file at later ones. The file's name covers everything that the times depend on. A file that
cannot be read or does not belong to this model is replaced.

The measure is CPU time of all threads. Other processes may use the cores meanwhile, and wall-clock
time can then be a hundred times too large.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time

import msgspec
import torch
from torch import Tensor

from worker.layers.linear import Linear
from worker.models.autotune import RowTime

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LEAST_TURNS, MOST_TURNS = 2, 5
BUDGET_S = 0.3
"""Time of all turns together. Each number of rows has an equal part, but at least LEAST_TURNS."""
COLD_ROWS = 32
"""Up to this number of rows, a step is timed without any of its weights in the caches ..."""
COLD_BYTES = 1 << 26
"""... which are filled with this much other data before each turn."""


class KeptTimes(msgspec.Struct, frozen=True):
    """Content of a file of measurements. `of` names what was measured, and on which machine."""

    of: list[str]
    table: list[RowTime]


def row_times(
    of: Sequence[str],
    packed: Sequence[Linear],
    read_dense: Callable[[], Sequence[Linear]] | None,
    inputs: Sequence[Tensor],
    folder: Path | None,
) -> list[RowTime]:
    """Return a layer's table, from the file if there is one.

    of           everything that the times depend on
    read_dense   reads the dense linears; called only without a file
    inputs       [max(ROWS), in] for each linear
    folder       directory of the files; None: no files
    """
    path = None if folder is None else folder / f"{_digest(of)}.json"
    if path is not None and (table := _read(path, of)) is not None:
        return table
    table = measure(packed, read_dense() if read_dense is not None else None, inputs)
    if path is not None:
        _write(path, KeptTimes(list(of), table))
    return table


@torch.inference_mode()
def measure(
    packed: Sequence[Linear], dense: Sequence[Linear] | None, inputs: Sequence[Tensor]
) -> list[RowTime]:
    """Time the forms in turns, and return the best turn of each."""
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


def _seconds(linears: Sequence[Linear], inputs: Sequence[Tensor], cold: Tensor) -> float:
    """Return the CPU time per thread, as if all threads had worked all the time."""
    cold.add_(1)
    started = process_time()
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)
    return (process_time() - started) / torch.get_num_threads()


def _digest(of: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(of).encode()).hexdigest()[:32]


def _read(path: Path, of: Sequence[str]) -> list[RowTime] | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=KeptTimes)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:  # a ValidationError is a DecodeError
        log.warning("cannot read %s, so the weights are measured again: %s", path, error)
        return None
    is_whole = tuple(time.rows for time in kept.table) == ROWS
    return kept.table if kept.of == list(of) and is_whole else None


def _write(path: Path, kept: KeptTimes) -> None:
    """Replace the file atomically, because several workers may start at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(kept))
        os.replace(name, path)
    except OSError as error:
        log.warning("cannot keep the measurements: %s", error)
