"""The limits of the control groups of this process, at any depth and in both versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from worker.device.machine import cgroup_free_bytes, cpu_quota

UNIT = "0::/system.slice/tidegate.service"
OLD = "9:name=systemd:/u\n4:memory:/slurm/job_7\n2:cpu,cpuacct:/slurm/job_7\n0::/u"


class LimitedMachine:
    """A directory with the files of /proc and /sys/fs/cgroup that limits are read from.

    membership   /proc/self/cgroup; None: it does not exist
    files        path below /sys/fs/cgroup -> content
    """

    def __init__(self, root: Path, membership: str | None, files: Mapping[str, str]) -> None:
        self._proc, self._cgroups = root / "proc", root / "cgroup"
        if membership is not None:
            (self._proc / "self").mkdir(parents=True)
            (self._proc / "self" / "cgroup").write_text(membership + "\n")
        for name, text in files.items():
            path = self._cgroups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    @property
    def quota(self) -> float | None:
        return cpu_quota(self._proc, self._cgroups)

    @property
    def free_bytes(self) -> int | None:
        return cgroup_free_bytes(self._proc, self._cgroups)


@pytest.mark.parametrize("membership", [None, "0::/", UNIT, OLD, "0::/../../other"])
def test_without_limits_there_are_none(tmp_path: Path, membership: str | None) -> None:
    machine = LimitedMachine(tmp_path, membership, {})
    assert machine.quota is None
    assert machine.free_bytes is None


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        # A container sees its own group as the root.
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        (None, {"cpu.max": "250000 100000"}, 2.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        # A unit of systemd with CPUQuota=.
        (UNIT, {"system.slice/tidegate.service/cpu.max": "200000 100000"}, 2.0),
        (UNIT, {"system.slice/cpu.max": "300000 100000"}, 3.0),
        (
            UNIT,
            {
                "system.slice/tidegate.service/cpu.max": "400000 100000",
                "system.slice/cpu.max": "150000 100000",
                "cpu.max": "max 100000",
            },
            1.5,
        ),
        (UNIT, {"system.slice/other.service/cpu.max": "100000 100000"}, None),
        # Its path is not visible, or is outside of what is.
        ("0::/not/seen/from/here", {"cpu.max": "100000 100000"}, 1.0),
        ("0::/../../other", {"cpu.max": "100000 100000"}, 1.0),
        # Version 1.
        (
            OLD,
            {
                "cpu/slurm/job_7/cpu.cfs_quota_us": "-1",
                "cpu/slurm/job_7/cpu.cfs_period_us": "100000",
                "cpu/slurm/cpu.cfs_quota_us": "50000",
                "cpu/slurm/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            "2:cpu,cpuacct:/docker/7",
            {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"},
            0.5,
        ),
    ],
)
def test_the_lowest_cpu_limit_of_all_groups_holds(
    tmp_path: Path, membership: str | None, files: Mapping[str, str], quota: float | None
) -> None:
    assert LimitedMachine(tmp_path, membership, files).quota == quota


def memory(group: str, limit: str, used: int, pages: int = 0) -> dict[str, str]:
    return {
        f"{group}/memory.max": limit,
        f"{group}/memory.current": str(used),
        f"{group}/memory.stat": f"anon 400\ninactive_file {pages}",
    }


def old_memory(group: str, limit: int, used: int, pages: int = 0) -> dict[str, str]:
    return {
        f"memory/{group}/memory.limit_in_bytes": str(limit),
        f"memory/{group}/memory.usage_in_bytes": str(used),
        f"memory/{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {pages}",
    }


@pytest.mark.parametrize(
    ("membership", "files", "free_bytes"),
    [
        ("0::/", memory(".", "1000", 700, pages=250), 550),  # pages can be dropped
        ("0::/", memory(".", "max", 700), None),
        ("0::/", memory(".", "1000", 1200), 0),
        (UNIT, memory("system.slice/tidegate.service", "1000", 100), 900),  # MemoryMax=
        (
            UNIT,
            memory("system.slice/tidegate.service", "1000", 100)
            | memory("system.slice", "5000", 4800),
            200,
        ),
        (UNIT, memory("system.slice/tidegate.service", "max", 100) | memory(".", "900", 1), 899),
        (OLD, old_memory("slurm/job_7", 1000, 900, pages=50), 150),
        (OLD, old_memory("slurm/job_7", 1 << 63, 0) | old_memory("slurm", 1000, 900), 100),
        ("4:memory:/docker/7", old_memory(".", 1000, 900), 100),
    ],
)
def test_the_least_free_memory_of_all_groups_holds(
    tmp_path: Path, membership: str, files: Mapping[str, str], free_bytes: int | None
) -> None:
    assert LimitedMachine(tmp_path, membership, files).free_bytes == free_bytes
