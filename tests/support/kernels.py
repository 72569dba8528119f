"""Kernels, random inputs and comparisons for tests of the kernels, on each instruction set.

Tests are skipped if no kernels were compiled when Tidegate was installed, and for instruction sets
that the processor lacks.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from tests.support.gguf_files import SCALES
from tests.support.hashed import hashed, hashed_normal
from worker.checkpoint.gguf_file import GGMLType
from worker.checkpoint.quant_blocks import BlockKind, QuantBlocks
from worker.device.cpuinfo import cpu_flags
from worker.kernels.instruction_sets import sets_of
from worker.kernels.library import NoKernels, load, runnable
from worker.kernels.native import NativeKernels

NAMES = [each.name for each in sets_of(platform.machine())]
"""The instruction sets of this architecture."""
FLOAT_NAMES = [name for name in NAMES if name != "avxvnni"]
"""Those that differ in more than products of integers. AVX-VNNI adds only these to AVX2."""
ATOL = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Tolerances for values of about 1. That for bfloat16 is one or two units in the last place."""


def native_kernels(name: str | None = None) -> NativeKernels:
    """Return the kernels of an instruction set, by default the best one. Skip the test if they
    cannot be loaded."""
    sets = [each for each in runnable(cpu_flags()) if name in (None, each.name)]
    if not sets:
        pytest.skip(f"this processor cannot run {name}")
    try:
        return NativeKernels(*load(sets))
    except NoKernels as missing:
        pytest.skip(str(missing))


def random_blocks(kind: BlockKind, outputs: int, inputs: int, seed: int = 0) -> QuantBlocks:
    """Return random quantised blocks. Their scales have both signs and about the sizes in SCALES.
    Those of MXFP4, which are powers of two, are positive."""
    items, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]]
    raw = hashed(outputs, inputs // items, num_bytes, seed=seed).astype(np.uint8)
    room = raw[:, :, kind.scale_bytes]
    if kind is BlockKind.MXFP4:
        room[:] = 118 + room % 5
        return QuantBlocks(kind, raw)
    shape = (*room.shape[:2], room.shape[2] // 2)
    spread = np.float32(SCALES.get(GGMLType[kind.name], 0.01))
    scales = hashed_normal(*shape, seed=~seed & 0xFFFFFFFF) * spread
    room[:] = scales.astype(np.float16).view(np.uint8)
    return QuantBlocks(kind, raw)


def dequantised(blocks: QuantBlocks) -> Tensor:
    """Return the weights, [outputs, inputs] float32, dequantised by the gguf package."""
    outputs = len(blocks.raw)
    rows = blocks.raw.reshape(outputs, -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType[blocks.kind.name]))


def randn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return random numbers, about normally distributed, which have the same bits everywhere."""
    return (torch.from_numpy(hashed_normal(*shape, seed=seed)) * scale).to(dtype)


def assert_near(ours: Tensor, theirs: Tensor, **more: Any) -> None:
    """Check that two tensors of one dtype are equal up to one or two roundings."""
    assert ours.dtype == theirs.dtype
    atol = ATOL[ours.dtype] * max(1.0, float(theirs.float().abs().max()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, **more)
