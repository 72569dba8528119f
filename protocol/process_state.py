"""What the kernel tells of the processes of this machine.

`proc` is where it tells that; a process may be gone by the time one asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL, Signals
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
STOPPED = "T"
"""By a signal; "t", which a debugger's look makes of it for a moment, is none of ours."""
ZOMBIE = "Z"
"""It has ended, and only waits to be counted."""
ENDING = 0x4 | 0x400
"""The kernel's PF_EXITING and PF_SIGNALED."""
PENDING = ("SigPnd:", "ShdPnd:")
"""In a process's status: signals that it was sent and has not noticed yet, a bit each."""


class Stat(NamedTuple):
    """state: a letter; started: ticks since the boot; cpu_s: what it has used, in seconds; flags:
    the kernel's"""

    state: str
    parent: int
    started: int
    cpu_s: float
    flags: int


def stat_of(pid: int, proc: Path = PROC) -> Stat | None:
    """None of one that is gone, and where nobody can tell."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    # Behind the name, which may hold anything.
    state, parent, *fields = text.rpartition(")")[2].split()
    ticks = int(fields[9]) + int(fields[10])
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return Stat(state, int(parent), int(fields[17]), cpu_s, int(fields[4]))


def all_stats(proc: Path = PROC) -> dict[int, Stat]:
    """Of all processes, by number."""
    pids = sorted(int(path.name) for path in proc.glob("[0-9]*"))
    return {pid: stat for pid in pids if (stat := stat_of(pid, proc)) is not None}


def families(heads: Iterable[int], parents: Mapping[int, int]) -> set[int]:
    """`heads`, and all whom they have started, and whom these have, and so on."""
    found = set(heads)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def words_of(pid: int, proc: Path = PROC) -> list[str]:
    """Its command line; nothing of one that is gone, or has ended."""
    try:
        line = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return line.removesuffix("\0").split("\0") if line else []


def name_of(pid: int, proc: Path = PROC) -> str:
    """What it runs: the module behind -m, or the program."""
    words = words_of(pid, proc)
    modules = [b for a, b in pairwise(words) if a == "-m"]
    return modules[0] if modules else Path(words[0]).name if words else "?"


def age_s_of(pid: int, proc: Path = PROC) -> float | None:
    """Return the seconds since a process began; None for one that is gone."""
    stat = stat_of(pid, proc)
    try:
        since_boot = float((proc / "uptime").read_text().split()[0])
    except OSError:
        return None
    return None if stat is None else since_boot - stat.started / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int, proc: Path = PROC) -> int:
    """Return the bytes of memory that a process has, with its share of what it shares; 0 for one
    that is gone."""
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def is_stopped(pid: int) -> bool:
    """Whether it is stopped (SIGSTOP, SIGTSTP) and computes nothing until somebody lets it go on.
    False where nobody can tell, and for one that is gone."""
    stat = stat_of(pid)
    return stat is not None and stat.state == STOPPED


def num_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory;
    None if the system does not say."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        name = {"": "memory.events", "memory": "memory.oom_control"}.get(controllers)
        for base in (cgroups / controllers / path.lstrip("/"), cgroups / controllers):
            if name is not None and (base / name).is_file():
                found = re.search(r"^oom_kill (\d+)$", (base / name).read_text(), re.MULTILINE)
                if found is not None:
                    return int(found[1])
    return None


def why_killed(number: Signals, num_before: int | None) -> str:
    """Return what is known of a death by signal `number` beside its name; "" if nothing is.

    num_before   `num_oom_kills` when the process was started
    """
    if number is not SIGKILL:
        return ""
    num_now = num_oom_kills()
    if num_now is None or num_before is None:
        return "perhaps memory was out"
    return "memory was out, so the kernel ended it" if num_now > num_before else ""


def is_ending(pid: int) -> bool:
    """Whether it is gone, or on its way: a large process that was killed takes its time. False
    where nobody can tell."""
    stat = stat_of(pid)
    if stat is None:
        return (PROC / "self").exists()
    return stat.state == ZOMBIE or bool(stat.flags & ENDING) or _is_killed(pid)


def _is_killed(pid: int) -> bool:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(PENDING)]
    return any(signals >> SIGKILL - 1 & 1 for signals in pending)
