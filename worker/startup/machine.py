"""What this machine has: CPU features, cores, memory, GPUs. Needs no torch.

Functions here read facts and decide nothing, except those whose arguments are the facts.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from protocol.config.worker import Dtype

BFLOAT16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""As /proc/cpuinfo spells them; the last is ARM's. Without one, bfloat16 is emulated and slow."""
CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")


def dtype_name(wanted: Dtype, *, is_gpu: bool, cpu_flags: frozenset[str]) -> str:
    """Return the dtype of weights and K/V. `cpu_flags`: what `cpu_flags()` reads."""
    if wanted == "auto":
        return "bfloat16" if is_gpu or cpu_flags & BFLOAT16_CPU_FLAGS else "float32"
    return wanted


def choose_threads(wanted: int, *, cores: int, quota: float | None) -> int:
    """`cores` we may run on, `quota` in cores where the container has one; at least one thread."""
    if wanted:
        return wanted
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Of the first core; empty where the system does not say."""
    return frozenset(_first_of(cpuinfo, "flags", "Features").split())


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name as the system spells it; empty where it does not say."""
    return _first_of(cpuinfo, "model name")


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
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


def free_host_bytes() -> int:
    """Return the memory that can still be allocated, on the machine or in this container."""
    machine = available_bytes()
    container = cgroup_free_bytes()
    return machine if container is None else min(machine, container)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What the system could hand out without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{meminfo} does not say how much memory is available")


def cgroup_free_bytes(cgroup: Path = CGROUP) -> int | None:
    """Limit minus use of the control group (version 2, then 1); None where it has no limit.

    File pages that can be dropped are counted as use by the kernel, but not here.
    """
    for limit, used, stat, dropped in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            most = (cgroup / limit).read_text().strip()
            taken = int((cgroup / used).read_text())
            pages = _statistic((cgroup / stat).read_text(), dropped)
        except (OSError, ValueError):
            continue
        return max(0, int(most) - taken + pages) if most.isdigit() else None
    return None


def _statistic(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def torch_build() -> tuple[str, str]:
    """Return the version of the installed torch, and for which GPUs it is built: "cuda", "hip" or
    "". Reads its version.py, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", ""
    text = _text(Path(spec.origin).with_name("version.py"))
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^'\n]+)'", text, re.MULTILINE))
    return found.get("__version__", ""), next((n for n in ("hip", "cuda") if n in found), "")
