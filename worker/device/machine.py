"""Facts about this machine: CPU features, cores, memory, the torch build. It does not import torch.

Most functions only read facts. `dtype_name` and `choose_threads` decide, and take the facts as
arguments.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from protocol.process.control_groups import CGROUPS, PROC, own_groups
from worker.device.cpuinfo import CPUINFO, first_of

X86_NAMES = ("model name", "cpu family", "model", "flags")
ARM_NAMES = ("CPU implementer", "CPU part", "CPU variant", "Features")
"""Names of lines in /proc/cpuinfo."""


def choose_threads(wanted: int, *, cores: int, quota: float | None, local_size: int = 1) -> int:
    """Return the number of torch threads, at least 1.

    cores        CPUs that this process may run on
    wanted       the option; 0: use all cores that this process may use
    quota        the container's CPU limit in cores; None: no limit
    local_size   number of workers that share the cores
    """
    if wanted:
        return wanted
    available = cores if quota is None else min(cores, int(quota))
    return max(1, available // local_size)


def thread_warning(wanted: int, *, cores: int, quota: float | None) -> str:
    """Return what to log about more threads than cores; "" if there are enough cores. The arguments
    are those of `choose_threads`."""
    available = choose_threads(0, cores=cores, quota=quota)
    if wanted <= available:
        return ""
    noun = "core" if available == 1 else "cores"
    return (
        f"--threads {wanted} is more than the {available} {noun} that this process may use; more "
        "threads than cores make each step slower"
    )


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name as the system spells it; empty if the system does not list it, as
    on ARM."""
    return first_of(cpuinfo, "model name")


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return what identifies the first core and its flags, separated by ", "; empty if the system
    lists nothing."""
    values = (first_of(cpuinfo, name) for name in (*X86_NAMES, *ARM_NAMES))
    return ", ".join(value for value in values if value)


def allowed_cores() -> int:
    """Return the number of cores in this process's CPU set."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Return the lowest CPU limit of this process's control groups, in cores; None if there is
    none."""
    quotas = [_quota(group) for group in own_groups("cpu", proc, cgroups)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """Return the CPU limit of one control group (version 2, then 1) in cores; None if unlimited."""
    try:
        limit, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        limit = _text(group / "cpu.cfs_quota_us")
        period = _text(group / "cpu.cfs_period_us")
    if not limit.isdigit() or not period.isdigit() or not int(period):
        return None  # "max", "-1" or missing
    return int(limit) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def free_host_bytes() -> int:
    """Return the memory that can still be allocated, in bytes: the smaller of what is free on the
    machine and in the control groups of this process."""
    machine = available_bytes()
    container = cgroup_free_bytes()
    return machine if container is None else min(machine, container)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that the machine can still allocate without swapping, in bytes. Raises
    OSError if the system does not report it."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{meminfo} has no line MemAvailable")


def cgroup_free_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the memory that this process's control groups still allow, in bytes; None if none has
    a limit."""
    free = [_free_bytes(group) for group in own_groups("memory", proc, cgroups)]
    return min((size for size in free if size is not None), default=None)


def _free_bytes(group: Path) -> int | None:
    """Return the memory limit of one control group minus its use, in bytes (version 2, then 1);
    None if there is no limit.

    The kernel counts file pages that can be dropped as used memory. This function counts them as
    free.
    """
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            max_bytes = (group / limit).read_text().strip()
            used_bytes = int((group / used).read_text())
            pages = _statistic((group / "memory.stat").read_text(), dropped)
        except (OSError, ValueError):
            continue
        return max(0, int(max_bytes) - used_bytes + pages) if max_bytes.isdigit() else None
    return None


def _statistic(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch.

    version   such as "2.13.0+cpu"; "" if torch is not installed
    gpu       the kind of GPU that it is built for: "cuda", "hip" or ""
    toolkit   version of CUDA or HIP that it is built with, major and minor; (0, 0) for CPUs
    """

    version: str = ""
    gpu: str = ""
    toolkit: tuple[int, int] = (0, 0)


def torch_build() -> TorchBuild:
    """Return the installed torch. This reads torch's version.py, because importing torch takes
    seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild()
    text = _text(Path(spec.origin).with_name("version.py"))
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^'\n]+)'", text, re.MULTILINE))
    gpu = next((name for name in ("hip", "cuda") if name in found), "")
    numbers = [int(number) for number in re.findall(r"\d+", found.get(gpu, ""))]
    major, minor = (*numbers, 0, 0)[:2]
    return TorchBuild(found.get("__version__", ""), gpu, (major, minor))
