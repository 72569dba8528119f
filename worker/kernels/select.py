"""Chooses the kernels: Triton's on a GPU, those compiled for the processor's best or fastest
instruction set on a CPU, or torch's.

attention/select.py then chooses the attention backend that belongs to the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from protocol.config.worker import KernelSet
from worker.device.triton_driver import reason_against_launches
from worker.errors import UnusableModel
from worker.kernels.base import Kernels
from worker.kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet
from worker.kernels.library import NoKernels, first_compiled, load, runnable
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels

log = logging.getLogger(__name__)

RIVALS = {"avx512bf16": "avx512"}
"""Instruction set -> another that is faster on some processors."""
ChooseKernels = Callable[[Sequence[NativeKernels]], NativeKernels]
"""Returns one of several kernels, the first of which are those of the best instruction set."""


def select_kernels(
    wanted: KernelSet,
    device: torch.device,
    *,
    cpu_flags: frozenset[str],
    choose: ChooseKernels | None = None,
) -> Kernels:
    """Return the kernels that the option `wanted` selects.

    - "torch": torch's kernels.
    - A device other than the CPU: Triton's kernels; torch's if Triton cannot launch kernels, or if
      the device is not of type "cuda".
    - "auto": the compiled kernels of the best instruction set; torch's if none can be loaded. If
      the set has a rival (RIVALS) that is compiled, `choose` decides between them.
    - The name of an instruction set: its kernels. Raises UnusableModel if the processor cannot run
      them, or if they are not compiled.

    cpu_flags   the processor's features, from `cpuinfo.cpu_flags`
    choose      None: the best instruction set
    """
    if wanted == "torch":
        return TorchKernels()
    if device.type != "cpu":
        return _kernels_of_gpu(device)
    sets = runnable(cpu_flags)
    if wanted == "auto":
        try:
            best = NativeKernels(*load(sets))
        except NoKernels as error:
            log.warning("serving with torch's kernels, which are several times slower: %s", error)
            return TorchKernels()
        rival = None if choose is None else _rival(best, sets)
        return best if choose is None or rival is None else choose([best, rival])
    if wanted not in (each.name for each in sets):
        raise UnusableModel(f"this processor cannot run kernels {wanted!r}")
    try:
        return NativeKernels(*load(each for each in INSTRUCTION_SETS if each.name == wanted))
    except NoKernels as error:
        raise UnusableModel(f"kernels {wanted!r}: {error}") from error


def _kernels_of_gpu(device: torch.device) -> Kernels:
    """Return Triton's kernels. Return torch's, and log why, if they cannot run on `device`."""
    reason = f"Triton's kernels do not support the device {device.type!r}"
    if device.type == "cuda" and not (reason := reason_against_launches()):
        # Triton takes a second to import, and is not needed on a CPU.
        from worker.kernels.gpu import TritonKernels

        return TritonKernels()
    log.warning("serving with torch's kernels, which have many more launches: %s", reason)
    return TorchKernels()


def _rival(best: NativeKernels, sets: Sequence[InstructionSet]) -> NativeKernels | None:
    """Return the kernels of the instruction set that `best` must be compared with (RIVALS). Return
    None if there is no such set among `sets`, or if its kernels cannot be loaded."""
    rivals = [each for each in sets if each.name == RIVALS.get(best.name)]
    if first_compiled(rivals) is None:
        return None
    try:
        return NativeKernels(*load(rivals))
    except (NoKernels, OSError) as error:
        log.warning("kernels for %s are not compared: %s", rivals[0].name, error)
        return None
