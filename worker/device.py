"""Where and in what precision to compute, and with how many threads: read once, before any tensor.

Facts about the machine are read by functions without decisions; decisions are pure.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from protocol.config.worker import Dtype
from worker.loading.errors import UnusableModel

BFLOAT16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""As /proc/cpuinfo spells them; the last is ARM's. Without one, bfloat16 is emulated and slow."""
CGROUP = Path("/sys/fs/cgroup")


def choose_device(wanted: str) -> torch.device:
    """wanted: "auto", "cpu", "cuda" or "cuda:N". Raises UnusableModel where that is absent."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnusableModel(f"device {wanted} was asked for, but torch sees no CUDA device")
    device = torch.device("cuda" if wanted == "auto" else wanted)
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= (count := torch.cuda.device_count()):
        raise UnusableModel(f"device {wanted} was asked for, but torch sees {count} CUDA devices")
    return device


def identity_of(device: torch.device) -> str | None:
    """By which all processes of this machine call a device that one of them has alone; None for the
    CPU, which is everybody's. A number would not do: it depends on what a process may see."""
    if device.type != "cuda":
        return None
    told = torch.cuda.get_device_properties(device)
    if (uuid := getattr(told, "uuid", None)) is not None:
        return f"gpu-{uuid}"
    place = [getattr(told, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in place:
        return "gpu-" + ":".join(f"{number:02x}" for number in place)
    return f"gpu-{device.index}"


def choose_dtype(wanted: Dtype, device: torch.device, *, cpu_flags: frozenset[str]) -> torch.dtype:
    """`cpu_flags`: what `cpu_flags()` reads."""
    if wanted == "auto":
        computes = device.type == "cuda" or bool(cpu_flags & BFLOAT16_CPU_FLAGS)
        return torch.bfloat16 if computes else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def choose_threads(wanted: int, *, cores: int, quota: float | None) -> int:
    """`cores` we may run on, `quota` in cores where the container has one; at least one thread."""
    if wanted:
        return wanted
    return max(1, cores if quota is None else min(cores, int(quota)))


def set_threads(threads: int) -> None:
    """Once per process and before its first tensor operation: torch fixes its pools then."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Of the first core; empty where the system does not say."""
    return frozenset(_first_of(cpuinfo, "flags", "Features").split())


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Of the first core, and what it can do; empty where the system does not say."""
    names = (_first_of(cpuinfo, name) for name in ("model name", "cpu family", "model", "flags"))
    return ", ".join(name for name in names if name)


def _first_of(cpuinfo: Path, *names: str) -> str:
    """What is told by the first line that has one of the names."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, told = line.partition(":")
        if name.strip() in names:
            return told.strip()
    return ""


def allowed_cores() -> int:
    """Cores in our CPU set."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Cores that the control group (version 2, then 1) grants; None where there is no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        limit = _text(cgroup / "cpu" / "cpu.cfs_quota_us")
        period = _text(cgroup / "cpu" / "cpu.cfs_period_us")
    if not limit.isdigit() or not period.isdigit() or not int(period):
        return None  # "max", "-1" or nothing at all
    return int(limit) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
