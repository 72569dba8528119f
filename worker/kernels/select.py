"""Chooses the kernels: those compiled for the processor's best instruction set, or torch's.

attention/select.py then chooses the attention backend that belongs to the kernels.
"""

from __future__ import annotations

import logging

import torch

from protocol.config.worker import KernelSet
from worker.kernels.base import Kernels
from worker.kernels.library import NoKernels, load, runnable
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels
from worker.kernels.sets import INSTRUCTION_SETS
from worker.loading.errors import UnusableModel

log = logging.getLogger(__name__)


def select_kernels(
    wanted: KernelSet, device: torch.device, *, cpu_flags: frozenset[str]
) -> Kernels:
    """Return the kernels that the option `wanted` selects.

    - "torch", or a device other than the CPU: torch's kernels.
    - "auto": the compiled kernels of the best instruction set; torch's if none can be loaded.
    - The name of an instruction set: its kernels. Raises UnusableModel if the processor cannot run
      them, or if they are not compiled.

    cpu_flags   the processor's features, from `cpuinfo.cpu_flags`
    """
    if wanted == "torch" or device.type != "cpu":
        return TorchKernels()
    sets = runnable(cpu_flags)
    if wanted == "auto":
        try:
            return NativeKernels(*load(sets))
        except NoKernels as error:
            log.warning("serving with torch's kernels, which are several times slower: %s", error)
            return TorchKernels()
    if wanted not in (each.name for each in sets):
        raise UnusableModel(f"this processor cannot run kernels {wanted!r}")
    try:
        return NativeKernels(*load(each for each in INSTRUCTION_SETS if each.name == wanted))
    except NoKernels as error:
        raise UnusableModel(f"kernels {wanted!r}: {error}") from error
