"""The state of this machine's processes, read from /proc.

A process may end at any time, so every function also handles a process that is gone. The argument
`proc` of a function is the path of /proc.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL, Signals
from typing import NamedTuple

from protocol.process.control_groups import CGROUPS, own_groups
from protocol.process.control_groups import PROC as PROC

TITLE_PREFIX = "tidegate: "
"""Start of the titles of our processes (process_title.py)."""
STOPPED = "T"
"""State of a process that a signal has stopped. A debugger's stop is another state, "t"."""
ZOMBIE = "Z"
"""State of a process that has ended and that its parent has not reaped yet."""
ENDING = 0x4 | 0x400
"""The kernel's flags PF_EXITING and PF_SIGNALED: the process is ending."""
PENDING = ("SigPnd:", "ShdPnd:")
"""Lines of /proc/PID/status with the bit masks of pending signals."""


class ProcessStat(NamedTuple):
    """The state of one process.

    state     the letter that `ps` shows
    parent    pid of its parent
    started   clock ticks between the boot and its start
    cpu_s     CPU time used, in seconds
    flags     the kernel's flags (PF_...)
    """

    state: str
    parent: int
    started: int
    cpu_s: float
    flags: int


def read_stat(pid: int, proc: Path = PROC) -> ProcessStat | None:
    """Return the state of a process; None if it is gone, or if there is no /proc."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The fields follow the name, which may contain anything.
    state, parent, *fields = text.rpartition(")")[2].split()
    ticks = int(fields[9]) + int(fields[10])
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return ProcessStat(state, int(parent), int(fields[17]), cpu_s, int(fields[4]))


def read_all_stats(proc: Path = PROC) -> dict[int, ProcessStat]:
    """Return the state of each process, by pid."""
    pids = sorted(int(path.name) for path in proc.glob("[0-9]*"))
    return {pid: stat for pid in pids if (stat := read_stat(pid, proc)) is not None}


def with_descendants(pids: Iterable[int], parents: Mapping[int, int]) -> set[int]:
    """Return `pids` and all their descendants. `parents` maps each process to its parent."""
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def read_command_line(pid: int, proc: Path = PROC) -> list[str]:
    """Return the command line of a process; empty if it is gone or has ended."""
    try:
        line = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return line.rstrip("\0").split("\0") if line else []


def program_name(pid: int, proc: Path = PROC) -> str:
    """Return the title of a process, if it is one of ours that has set it, or else the module after
    -m on its command line, or else the name of its program. Return "?" if the process is gone."""
    arguments = read_command_line(pid, proc)
    if arguments and arguments[0].startswith(TITLE_PREFIX):
        return arguments[0]
    modules = [b for a, b in pairwise(arguments) if a == "-m"]
    return modules[0] if modules else Path(arguments[0]).name if arguments else "?"


def process_age_s(pid: int, proc: Path = PROC) -> float | None:
    """Return the number of seconds since a process started; None if it is gone."""
    stat = read_stat(pid, proc)
    try:
        since_boot = float((proc / "uptime").read_text().split()[0])
    except OSError:
        return None
    return None if stat is None else since_boot - stat.started / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, proc: Path = PROC) -> int:
    """Return the memory of a process in bytes, with its share of shared memory; 0 if it is gone."""
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP, SIGTSTP) has stopped a process. False if it is gone."""
    stat = read_stat(pid)
    return stat is not None and stat.state == STOPPED


def num_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory.
    Return None if the kernel does not report the number."""
    for group in own_groups("memory", proc, cgroups):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, and of version 1
            with contextlib.suppress(OSError):
                found = re.search(r"^oom_kill (\d+)$", (group / name).read_text(), re.MULTILINE)
                if found is not None:
                    return int(found[1])
    return None


def explain_kill(number: Signals, num_before: int | None) -> str:
    """Return an explanation if the signal `number` was probably sent for lack of memory, else "".

    Only SIGKILL is explained. If the kernel does not report how many processes it killed for lack
    of memory, the text starts with "perhaps".

    num_before   `num_oom_kills()` when the process was started
    """
    if number is not SIGKILL:
        return ""
    num_now = num_oom_kills()
    if num_now is None or num_before is None:
        return "perhaps out of memory"
    return "out of memory, so the kernel killed it" if num_now > num_before else ""


def is_ending(pid: int) -> bool:
    """Return whether a process has ended or is ending: freeing the memory of a large one takes a
    while. Return False if the system has no /proc."""
    stat = read_stat(pid)
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
