"""What runs here, and what was left behind: run directories, who holds them, and processes.

A server's processes inherit its lock (run_lock.py), so the kernel knows whose they are, even where
the first of them is gone. What these have started in turn is found below them. Only what is of this
user is looked at. Reads; changes nothing but in `clear`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from protocol import devices
from protocol.devices import DeviceHolder
from protocol.process_state import PROC, ZOMBIE, families, name_of, stat_of
from protocol.sockets import run_directory
from tools.failure import Failure
from tools.processes import run_lock

ROOMS = frozenset({"engine_core", "worker"})
"""What none but us starts; a gateway is one of many that run by gunicorn."""
INIT = 1


class RunningProcess(msgspec.Struct, frozen=True):
    """started: ticks since the boot; with `pid` it is never another's."""

    pid: int
    parent: int
    started: int
    name: str


class RunDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """A run directory.

    name       the HTTP port of a server, or "engine-..." of an engine that runs alone
    url        of the server, or the engine's address; "" of one that has not said it
    model      the name of what it serves; "" until it is known
    pid        of its first process, as it has said; None where nobody holds the directory
    leads      that process is there
    processes  all that belong to it
    sockets    files that lie there
    """

    name: str
    url: str = ""
    model: str = ""
    pid: int | None
    leads: bool
    processes: list[RunningProcess]
    sockets: list[str]

    @property
    def state(self) -> str:
        if self.pid is None:
            return "left behind" if self.sockets else "free"
        return "serves" if self.leads else "lost its supervisor"


class Found(msgspec.Struct, frozen=True):
    """strays   rooms of ours that belong to no run directory, and whose parent is gone
    devices  of each that anybody has, who that is
    """

    places: list[RunDirectory]
    strays: list[RunningProcess]
    devices: dict[str, list[DeviceHolder]] = {}


def base_directory() -> Path:
    return run_directory(0).parent


def look(base: Path, proc: Path = PROC) -> Found:
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
    return Found(places, strays, devices.held(devices.directory(base)))


def _is_stray(process: RunningProcess) -> bool:
    return process.parent == INIT and process.name in ROOMS


def processes(proc: Path = PROC) -> dict[int, RunningProcess]:
    """Of this user, by number; those that have ended and wait to be counted are none."""
    found = {}
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            pid = int(folder.name)
            stat = stat_of(pid, proc)
            if stat is not None and stat.state != ZOMBIE:
                found[pid] = RunningProcess(pid, stat.parent, stat.started, name_of(pid, proc))
    return found


def _holding(lock: Path, running: Mapping[int, RunningProcess], proc: Path) -> Iterator[int]:
    """Those that have it open."""
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
    return families(heads, {p.pid: p.parent for p in running.values()}) - {os.getpid()}


def clear(directory: Path) -> list[str]:
    """Remove what lies in a directory that nobody holds; the names. A server that starts meanwhile
    is safe, for we hold its lock."""
    if not directory.is_dir():
        return []
    try:
        lock = run_lock.hold(directory)
    except Failure:
        return []  # somebody has come
    try:
        return run_lock.dissolve(directory)
    finally:
        os.close(lock)
