"""`python -P -m worker.startup.check_device DEVICE`: check whether a worker can use a device.

This takes a moment, so a GPU that is missing is found before a model is downloaded. If the device
cannot be used, the exit code is that of ExitCode.BAD_MODEL, and stderr has the reason and the
remedy in one line. torch is not imported.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from protocol.process.exit_codes import ExitCode
from protocol.tools.start_facts import CudaDriver
from worker.device import cuda_driver, machine
from worker.device.environment import VISIBLE_DEVICES, visible_devices
from worker.device.machine import TorchBuild
from worker.errors import UnusableModel

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """The device of a worker.

    name          "cpu" or "cuda:N"
    free_bytes    its free memory; `sys.maxsize` with ROCm: unknown
    total_bytes   its whole memory; `sys.maxsize` with ROCm; 0 for the CPU
    """

    name: str
    free_bytes: int
    total_bytes: int = 0


def choose_device(wanted: str, visible: str | None = None, local_rank: int = 0) -> ChosenDevice:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N". With torch,
    `worker.device.device.choose_device` chooses the same one.

    visible      value of VISIBLE_DEVICES, for error messages
    local_rank   number of the GPU of a rank of a group, unless one is named

    Raises UnusableModel, with the reason and a remedy, if the device cannot be used.
    """
    build = machine.torch_build()
    if wanted == CPU or (wanted == "auto" and not build.gpu):
        return ChosenDevice(CPU, machine.free_host_bytes())
    if build.gpu == "hip":  # only torch can list these devices, and the worker loads it later
        name = f"cuda:{local_rank}" if wanted in ("auto", "cuda") else wanted
        return ChosenDevice(name, sys.maxsize, sys.maxsize)
    driver = cuda_driver.read_driver(visible)
    index = local_rank if wanted in ("auto", "cuda") else int(wanted.partition(":")[2])
    if problem := gpu_problem(build, driver, index):
        if wanted == "auto" and (not index or gpu_problem(build, driver)):
            return ChosenDevice(CPU, machine.free_host_bytes())
        reason, remedy = problem
        raise UnusableModel(
            f"device {wanted} was requested, but {reason}",
            remedy=f"serve with --device cpu, or {remedy}",
        )
    gpu = driver.gpus[index]
    return ChosenDevice(f"cuda:{index}", gpu.free_bytes, gpu.total_bytes)


def gpu_problem(build: TorchBuild, driver: CudaDriver, index: int = 0) -> tuple[str, str] | None:
    """Return why torch cannot use the GPU `index`, and a remedy; None if it can."""
    if driver.problem:  # first: without a driver, another torch would not help
        return driver.problem, driver.remedy
    if not build.gpu:
        version = build.version.partition("+")[0]
        return (
            f"the installed torch ({build.version}) is a build for CPUs",
            f"install a build for CUDA, a download of gigabytes: {sys.executable} -m pip "
            f"--isolated install --force-reinstall torch=={version}",
        )
    if driver.cuda[0] < build.toolkit[0]:
        return (
            f"the installed torch ({build.version}) needs a driver for CUDA {build.toolkit[0]}, "
            f"and this one ({driver.version or 'of unknown version'}) supports CUDA "
            f"{driver.cuda[0]}.{driver.cuda[1]}",
            "update NVIDIA's driver",
        )
    if index >= len(driver.gpus):
        names = [f"cuda:{number}" for number in range(len(driver.gpus))]
        return f"the visible GPUs are {', '.join(names)}", "check nvidia-smi and " + VISIBLE_DEVICES
    return None


def unused_gpu(visible: str | None) -> str:
    """Return why torch cannot use the first of the driver's GPUs, and a remedy. Return "" if it
    can, or if there is none."""
    driver = cuda_driver.read_driver(visible)
    problem = gpu_problem(machine.torch_build(), driver) if driver.gpus else None
    return "" if problem is None else "; ".join(problem)


def main() -> int:
    try:
        choose_device(sys.argv[1], visible_devices())
    except UnusableModel as error:
        print(f"{error.message}; {error.remedy}", file=sys.stderr)
        return ExitCode.BAD_MODEL
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
