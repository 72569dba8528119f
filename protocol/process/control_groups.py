"""The control groups (cgroups) of this process: its own, and all that contain it.

Each may have a limit, and all limits hold. A container usually sees its own group as the root of
/sys/fs/cgroup. A unit of systemd or a job of SLURM is a directory below it, named in
/proc/self/cgroup.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

Controller = Literal["cpu", "memory"]


def own_groups(controller: Controller, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Path]:
    """Return the directories of the groups of this process, in versions 1 and 2, each before those
    that contain it. Some may not exist.

    A path that starts outside the visible groups is ignored; their root is always returned.
    """
    try:
        lines = os.fsdecode((proc / "self" / "cgroup").read_bytes()).splitlines()
    except OSError:
        lines = []
    paths = {"": "/", controller: "/"}  # of version 2, and of the controller in version 1
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths |= {name: path for name in controllers.split(",") if name in paths}
    return [group for name, path in paths.items() for group in _with_parents(cgroups / name, path)]


def _with_parents(root: Path, path: str) -> list[Path]:
    """Return the directory `path` below `root`, and all between them, with `root` at the end."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]
