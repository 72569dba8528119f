"""Chooses the instruction set that multiplies fastest on this processor, by measuring it once.

The newest instructions are not always the fastest: some processors take longer for a product of
pairs of bfloat16 (`avx512bf16`) than for the same numbers as floats (`avx512`). With either set, a
position has the same bits however it is computed. Between the two, bits differ, so the library is
part of the fingerprint, and the choice is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import byref
from math import prod
from pathlib import Path
from time import thread_time

import msgspec
import numpy as np
import torch

from worker.checkpoint.quant_blocks import BlockKind, QuantBlocks
from worker.device.measurements import stored_or_measured
from worker.kernels.addresses import address
from worker.kernels.library import VERSION
from worker.kernels.native import DTYPE_CODES, NativeKernels
from worker.kernels.packed import PackedMatrix, pack

log = logging.getLogger(__name__)

CLEARLY = 0.9
"""The other set is chosen only if it takes at most this fraction of the best set's time."""
ROWS = (1, 16, 128)
TURNS = 7
OUTPUTS, INPUTS = 512, 1024
KIND, BLOCK_BYTES = BlockKind.Q4_1, 20


class SetTimes(msgspec.Struct, frozen=True):
    """Seconds for each of ROWS with one instruction set."""

    name: str
    seconds: list[float]

    @property
    def is_valid(self) -> bool:
        return len(self.seconds) == len(ROWS) and all(each > 0 for each in self.seconds)


def fastest(
    sets: Sequence[NativeKernels],
    *,
    dtype: torch.dtype,
    rounds_inputs: bool,
    processor: str,
    folder: Path,
) -> NativeKernels:
    """Return the set that multiplies fastest. The times are stored in `folder`, and read from there
    at later starts. Return the first set if they cannot be stored, because the choice must not
    change between starts.

    sets            at least one; the first is preferred
    dtype           of the inputs
    rounds_inputs   whether inputs are rounded to eight bits
    processor       name and features of the processor
    """
    names = [each.name for each in sets]
    of = ["instruction sets", *names, processor, str(dtype), str(rounds_inputs), str(VERSION)]
    times, is_stored = stored_or_measured(
        folder,
        of,
        list[SetTimes],
        lambda: measure(sets, dtype, rounds_inputs=rounds_inputs),
        lambda times: [time.name for time in times if time.is_valid] == names,
    )
    chosen = choose(times) if is_stored else names[0]
    if chosen != names[0]:
        log.info("kernels for %s are faster here than those for %s", chosen, names[0])
    return sets[names.index(chosen)]


def choose(times: Sequence[SetTimes]) -> str:
    """Return the name of the fastest set, by the geometric mean over ROWS. A set after the first
    must be clearly faster than the first (CLEARLY)."""
    first = times[0]

    def ratio(time: SetTimes) -> float:
        pairs = zip(time.seconds, first.seconds, strict=True)
        return prod(own / best for own, best in pairs) ** (1 / len(first.seconds))

    other = min(times, key=ratio)
    return other.name if ratio(other) <= CLEARLY else first.name


def measure(
    sets: Sequence[NativeKernels], dtype: torch.dtype, *, rounds_inputs: bool
) -> list[SetTimes]:
    """Return the shortest time of each set for each of ROWS, in CPU seconds of one thread: several
    threads wait for each other, which takes CPU time if another program has their processor. The
    sets are measured alternately, so that a disturbance affects all.
    """
    shape = (OUTPUTS, INPUTS // KIND.weights, BLOCK_BYTES)
    raw = np.resize(np.arange(256, dtype=np.uint8), shape)
    raw[..., KIND.scale_bytes] = np.array([0.01, -0.07], np.float16).view(np.uint8)
    matrices = [pack(each, QuantBlocks(KIND, raw), rounds_inputs=rounds_inputs) for each in sets]
    x = torch.arange(max(ROWS) * INPUTS).sin().view(max(ROWS), INPUTS).to(dtype)
    y = torch.empty(max(ROWS), OUTPUTS, dtype=dtype)

    def seconds(kernels: NativeKernels, matrix: PackedMatrix, rows: int) -> float:
        started_at = thread_time()
        kernels.library.linear_same(
            DTYPE_CODES[dtype], 1, address(x), rows, byref(matrix.struct), None, address(y)
        )
        return thread_time() - started_at

    turns = [
        [[seconds(*each, rows) for rows in ROWS] for each in zip(sets, matrices, strict=True)]
        for _ in range(TURNS)
    ]
    best = np.array(turns).min(axis=0)  # [sets, rows]
    return [SetTimes(each.name, times.tolist()) for each, times in zip(sets, best, strict=True)]
