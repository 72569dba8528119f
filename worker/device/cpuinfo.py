"""Reads facts about the processor from Linux's /proc/cpuinfo.

This file imports nothing of Tidegate, because setup.py reads it before Tidegate is installed.
"""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def first_of(cpuinfo: Path, *names: str) -> str:
    """Return the value of the first line whose name is one of `names`, or ""."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the features of the first core; empty if the system does not list them."""
    return frozenset(first_of(cpuinfo, "flags", "Features").split())
