"""Prints this machine's facts and a worker's defaults on it, as JSON:

    python -P -m worker.startup.machine_facts LIBRARIES

LIBRARIES is the directory of `tidegate fetch-kernels`. This module calls the same functions as a
starting worker, so both have the same results. torch is imported late, after `prepare`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from protocol.config.worker import WorkerConfig
from protocol.process.quick_exit import quick_exit
from protocol.tools.start_facts import MachineFacts
from worker.device import environment, machine
from worker.device.cpuinfo import cpu_flags
from worker.device.cuda_driver import read_driver
from worker.kernels.number_types import number_types

SPEED_FLAGS = frozenset(
    {"avx2", "fma", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"}
    | {"avx_vnni"}
    | {"neon", "asimd", "asimddp", "sve", "bf16", "i8mm"}
)
"""CPU features that affect speed or precision. The last line lists those of ARM."""


def machine_facts(libraries: Path) -> MachineFacts:
    import torch

    from worker.device import device as devices
    from worker.startup import gpu_libraries
    from worker.startup.check_device import gpu_problem

    device = devices.choose_device("auto")
    flags = cpu_flags()
    types = number_types(WorkerConfig(model=""), is_gpu=device.type != "cpu", cpu_flags=flags)
    cores, quota = machine.allowed_cores(), machine.cpu_quota()
    build, driver = machine.torch_build(), read_driver(environment.visible_devices())
    problem, remedy = (driver.gpus and gpu_problem(build, driver)) or ("", "")
    return MachineFacts(
        torch=str(torch.__version__),
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        device_id=devices.identity_of(device) or "",
        dtype=types.dtype,
        cpu=machine.cpu_model(),
        cpu_flags=sorted(flags & SPEED_FLAGS),
        cores=cores,
        quota=quota,
        threads=machine.choose_threads(0, cores=cores, quota=quota),
        free_bytes=devices.free_bytes(device),
        torch_build=f"{build.gpu.upper()} {build.toolkit[0]}.{build.toolkit[1]}"
        if build.gpu
        else "CPUs",
        driver=driver,
        gpu_problem=problem,
        gpu_remedy=remedy,
        triton=gpu_libraries.version_of("triton"),
        c_compiler=gpu_libraries.c_compiler(),
        attention=gpu_libraries.attention_libraries(libraries),
    )


def main() -> int:
    environment.prepare()
    facts = machine_facts(Path(sys.argv[1]))
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    return 0


if __name__ == "__main__":
    quick_exit(main())
