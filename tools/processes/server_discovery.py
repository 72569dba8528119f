"""Finds this user's servers, their processes, and what dead servers left behind.

The processes of a server inherit its lock (run_lock.py), so they can be found even if the
supervisor is gone. Their descendants belong to the server, too. Only `clear` changes anything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from protocol import devices
from protocol.devices import DeviceHolder
from protocol.process_state import PROC, ZOMBIE, program_name, read_stat, with_descendants
from protocol.sockets import run_directory
from tools.failure import Failure
from tools.processes import run_lock

ROOMS = frozenset({"engine_core", "worker"})
"""Process names that only Tidegate uses. Gateways run in gunicorn, as other programs do."""
INIT = 1


class RunningProcess(msgspec.Struct, frozen=True):
    """A process of this user. `pid` and `started` together identify it."""

    pid: int
    parent: int
    #: Clock ticks between the boot and the start of the process.
    started: int
    name: str


class RunDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """A run directory, and the server that holds it."""

    #: The HTTP port of a server, or "engine-..." for an engine without a gateway.
    name: str
    #: URL of the server, or address of the engine; "" until it is known.
    url: str = ""
    #: Name of the model; "" until it is known.
    model: str = ""
    #: Process id of the supervisor; None if no process holds the directory.
    pid: int | None
    #: Whether the supervisor runs.
    leads: bool
    #: All processes of the server.
    processes: list[RunningProcess]
    #: Names of the sockets in the directory.
    sockets: list[str]

    @property
    def state(self) -> str:
        if self.pid is None:
            return "left behind" if self.sockets else "free"
        return "serves" if self.leads else "lost its supervisor"


class Found(msgspec.Struct, frozen=True):
    """The servers of this user on this machine. `tidegate ps --json` prints these fields."""

    places: list[RunDirectory]
    #: Engines and workers that belong to no run directory, and whose parent is gone.
    strays: list[RunningProcess]
    #: Device -> the processes that use it.
    devices: dict[str, list[DeviceHolder]] = {}


def base_directory() -> Path:
    return run_directory(0).parent


def discover(base: Path, proc: Path = PROC) -> Found:
    running = processes(proc)
    places = []
    for directory in sorted(base.iterdir()) if base.is_dir() else []:
        if not (directory / run_lock.LOCK).is_file():
            continue
        own = _family(_holding(directory / run_lock.LOCK, running, proc), running)
        pid = run_lock.holder(directory)
        facts = run_lock.LockFacts() if pid is None else run_lock.facts(directory)
        places.append(
            RunDirectory(
                name=directory.name,
                url=facts.url,
                model=facts.model,
                pid=pid,
                leads=pid in running,
                processes=[] if pid is None else [running[each] for each in sorted(own)],
                sockets=sorted(path.name for path in directory.iterdir() if path.is_socket()),
            )
        )
    known = {each.pid for place in places for each in place.processes}
    strays = [p for p in running.values() if _is_stray(p) and p.pid not in known]
    return Found(places, strays, devices.holders_by_device(devices.directory(base)))


def _is_stray(process: RunningProcess) -> bool:
    return process.parent == INIT and process.name in ROOMS


def processes(proc: Path = PROC) -> dict[int, RunningProcess]:
    """Return the processes of this user by pid, without zombies."""
    found = {}
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            pid = int(folder.name)
            stat = read_stat(pid, proc)
            if stat is not None and stat.state != ZOMBIE:
                found[pid] = RunningProcess(pid, stat.parent, stat.started, program_name(pid, proc))
    return found


def _holding(lock: Path, running: Mapping[int, RunningProcess], proc: Path) -> Iterator[int]:
    """Yield the processes that have the lock file open."""
    info = lock.stat()
    for pid in running:
        with contextlib.suppress(OSError):
            for descriptor in (proc / str(pid) / "fd").iterdir():
                if os.readlink(descriptor) != str(lock):
                    continue
                opened = descriptor.stat()
                if (opened.st_dev, opened.st_ino) == (info.st_dev, info.st_ino):
                    yield pid
                    break


def _family(heads: Iterator[int], running: Mapping[int, RunningProcess]) -> set[int]:
    return with_descendants(heads, {p.pid: p.parent for p in running.values()}) - {os.getpid()}


def clear(directory: Path) -> list[str]:
    """Remove a run directory that no process holds. Returns the names of the removed files.

    This function holds the lock meanwhile, so it cannot affect a server that is just starting.
    """
    if not directory.is_dir():
        return []
    try:
        lock = run_lock.hold(directory)
    except Failure:
        return []  # a server has just started
    try:
        return run_lock.dissolve(directory)
    finally:
        os.close(lock)
