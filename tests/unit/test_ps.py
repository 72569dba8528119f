"""What `tidegate ps` says of what it has found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.devices import DeviceHolder
from tools.commands.ps import ProcessUsage, duration, format_found
from tools.commands.stop import select, signal_targets
from tools.processes.server_discovery import Found, RunDirectory, RunningProcess, discover

SUPERVISOR, ENGINE = RunningProcess(10, 1, 5, "tools"), RunningProcess(11, 10, 6, "engine_core")


def place(**fields) -> RunDirectory:
    more = {"name": "8000", "pid": 10, "leads": True, "processes": [SUPERVISOR, ENGINE]}
    return RunDirectory(**{**more, "sockets": ["engine.sock"], **fields})


def test_each_state_of_a_place_is_told() -> None:
    named = place(name="7000", url="http://127.0.0.1:7000", model="small")
    lost = place(name="8001", leads=False, processes=[ENGINE])
    stale = place(name="engine-ab", pid=None, leads=False, processes=[])
    free = place(name="8002", pid=None, leads=False, processes=[], sockets=[])
    usages = {
        "7000": ProcessUsage(3725.0, 3 << 29),
        "8000": ProcessUsage(5.2),
        "8001": ProcessUsage(),
    }
    holder = DeviceHolder(pid=13, place="engine-cd", model="small", since=1.7e9, shares=True)
    strays, devices = [RunningProcess(12, 1, 7, "worker")], {"gpu-0a1b": [holder]}
    found = Found([named, place(), lost, stale, free], strays, devices)
    text = format_found(found, usages | {"engine-ab": ProcessUsage()})
    assert text.splitlines() == [
        "port     7000: serves small at http://127.0.0.1:7000 (pid 10), up 1 h 2 min, 1.50 GiB",
        "         tools (pid 10)",
        "         engine_core (pid 11)",
        "port     8000: serves (pid 10), up 5 s",
        "         tools (pid 10)",
        "         engine_core (pid 11)",
        "port     8001: lost its supervisor (pid 10)",
        "         engine_core (pid 11)",
        "engine   engine-ab: left behind",
        "         sockets without a process: engine.sock",
        "stray    worker (pid 12) belongs to no server; to end it: kill 12",
        "device   gpu-0a1b: pid 13 (small as engine-cd, since 2023-11-14 22:13:20 UTC, shared)",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (61, "1 min 1 s"), (86400, "1 d"), (90061, "1 d 1 h")],
)
def test_a_time_span_is_told_in_its_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_first_process_is_asked_and_the_others_where_it_is_gone() -> None:
    assert signal_targets(place(), kill=False) == [SUPERVISOR]
    assert signal_targets(place(), kill=True) == [SUPERVISOR, ENGINE]
    assert signal_targets(place(leads=False, processes=[ENGINE]), kill=False) == [ENGINE]
    one, other = place(), place(name="8001")
    assert select(Found([one, other], []), ["8001", "8001"]) == [other]
    assert select(Found([one, other], []), []) == [one, other]


def test_strays_are_rooms_of_ours_whose_parent_is_gone(tmp_path: Path) -> None:
    for pid, parent, state, words in [
        (7, 1, "S", "python\0-m\0worker\0"),
        (8, 1, "Z", "python\0-m\0worker\0"),
        (9, 6, "S", "python\0-m\0engine_core\0"),
        (10, 1, "S", "sshd\0"),
    ]:
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        rest = " ".join(["0"] * 17 + [str(pid * 100)])
        (folder / "stat").write_text(f"{pid} (a (b) c) {state} {parent} {rest}")
        (folder / "cmdline").write_bytes(words.encode())
    found = discover(tmp_path / "none", tmp_path / "proc")
    assert found == Found([], [RunningProcess(7, 1, 700, "worker")])
    assert os.getuid() == (tmp_path / "proc").stat().st_uid
