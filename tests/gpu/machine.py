"""Times what limits everything else on a device: copies and products of matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.gpu.session import GpuSession
from tests.gpu.table import GpuRow, NotPossible, figure
from tests.gpu.timing import best_s

COPY_BYTES = 4 << 30
MATRIX = 8192


def copy_bandwidth(session: GpuSession) -> float:
    """Return the bytes per second that a copy within the device's memory reads and writes."""
    size = session.choose(COPY_BYTES, 1 << 20)
    source, target = (torch.ones(size, dtype=torch.uint8, device=session.device) for _ in "st")
    return 2 * size / best_s(session, lambda: target.copy_(source))


def measure_machine(session: GpuSession) -> Iterator[GpuRow]:
    if not session.is_rehearsal and not torch.cuda.is_available():
        raise NotPossible("torch finds no CUDA device")
    yield figure("copy in memory", copy_bandwidth(session) / 1e12, "TB/s")
    size = session.choose(MATRIX, 64)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=session.device) for _ in "ab")
    seconds = best_s(session, lambda: torch.mm(a, b))
    yield figure("product of matrices, bfloat16", 2 * size**3 / seconds / 1e12, "TFLOP/s")
