"""`tidegate ps` and `stop`: which processes belong to which server, and what happens to leftovers.

Servers are small programs here. Each holds a run directory, and has a child that inherited the lock
and a grandchild that did not.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from tests.support.commands import run_command
from tests.support.processes import ROOT, Program, is_alive
from tests.support.waiting import eventually
from tools.processes.discovery import Found, RunDirectory, discover

SERVER = """
import subprocess, sys, time
from pathlib import Path
from tools.processes import run_lock
sleeper = "import time; time.sleep(600)"
child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}]); {sleeper}"
lock = run_lock.hold(Path(sys.argv[1]))
subprocess.Popen([sys.executable, "-c", child], pass_fds=[lock])
print("holds", flush=True)
time.sleep(600)
"""


class ServerMachine:
    """The run directories of a user, and the programs that hold them."""

    def __init__(self, runtime: Path, stack: ExitStack, capfd: pytest.CaptureFixture[str]) -> None:
        self.base = runtime / f"tidegate-{os.getuid()}"
        self._capfd = capfd
        self._environment = {"XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(ROOT)}
        self._stack = stack

    def serve(self, name: str) -> Program:
        arguments = ["-c", SERVER, str(self.base / name)]
        program = self._stack.enter_context(Program(arguments, environment=self._environment))
        program.line_with("holds")
        assert eventually(lambda: len(self.place(name).processes) == 3)
        self._stack.callback(self.kill, pids(self.place(name)))
        return program

    def leave_socket(self, name: str) -> Path:
        path = self.base / name / "engine.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
        return path

    def tool(self, *words: str, code: int = 0) -> str:
        done = run_command(self._capfd, *words)
        assert done.code == code, done.err
        return done.out + done.err

    def places(self) -> dict[str, RunDirectory]:
        return {place.name: place for place in discover(self.base).run_directories}

    def place(self, name: str) -> RunDirectory:
        return self.places()[name]

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[ServerMachine]:
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with ExitStack() as stack:
        yield ServerMachine(runtime, stack, capfd)


def pids(place: RunDirectory) -> list[int]:
    return [process.pid for process in place.processes]


def test_a_server_is_listed_with_all_its_processes_and_stopped_alone(
    machine: ServerMachine,
) -> None:
    first, second = machine.serve("8001"), machine.serve("8002")
    found = machine.places()
    assert found["8001"].pid == first.process.pid
    assert first.process.pid in pids(found["8001"])
    assert not set(pids(found["8001"])) & set(pids(found["8002"]))
    assert f"8001: serves (pid {first.process.pid})" in machine.tool("ps")
    result = msgspec.json.decode(machine.tool("ps", "--json"), type=Found)
    assert {place.name: place for place in result.run_directories} == found
    printed = machine.tool("stop", "8001", "--kill")
    assert "stopped  8001 (3 processes)" in printed
    assert not any(map(is_alive, pids(found["8001"])))
    assert all(map(is_alive, pids(found["8002"])))
    assert second.process.poll() is None


def test_a_process_that_does_not_stop_is_named_and_not_killed(machine: ServerMachine) -> None:
    """A real supervisor would kill its children; this program does not."""
    server = machine.serve("8001")
    found = machine.place("8001")
    result = machine.tool("stop", "8001", "--wait-s", "0.2", code=1)
    assert "still running after 0.2 s" in result
    assert server.process.wait(10) == -signal.SIGTERM, "it was asked"
    children = [pid for pid in pids(found) if pid != server.process.pid]
    assert all(map(is_alive, children))


def test_children_of_a_killed_supervisor_are_found_and_stopped(machine: ServerMachine) -> None:
    server = machine.serve("8001")
    path = machine.leave_socket("8001")
    left = [pid for pid in pids(machine.place("8001")) if pid != server.process.pid]
    server.signal(signal.SIGKILL)
    server.process.wait(10)
    assert pids(machine.place("8001")) == left
    assert "lost its supervisor" in machine.tool("ps")
    result = machine.tool("stop", "--all")
    assert "stopped  8001 (2 processes)" in result
    assert "removed  8001/engine.sock" in result
    assert not path.exists()
    assert not any(map(is_alive, left))
    assert machine.places() == {}


def test_sockets_of_dead_servers_are_removed(machine: ServerMachine) -> None:
    assert machine.places() == {}
    assert "nothing runs at 8001" in machine.tool("stop", "8001", code=1)
    server = machine.serve("8001")
    everybody = pids(machine.place("8001"))
    path = machine.leave_socket("8001")
    machine.kill(everybody)
    server.process.wait(10)
    assert eventually(lambda: not any(map(is_alive, everybody)))
    assert "sockets without a process: engine.sock" in machine.tool("ps")
    assert machine.tool("stop", "8001") == "removed  8001/engine.sock\n"
    assert not path.exists()
    assert "8001" not in machine.tool("ps")
    assert machine.places() == {}


def test_the_only_server_is_stopped_and_of_several_one_has_to_be_named(
    machine: ServerMachine,
) -> None:
    assert "no server is running; see: tidegate ps" in machine.tool("stop", code=1)
    assert "give servers or --all" in machine.tool("stop", "8001", "--all", code=2)
    machine.serve("8001")
    machine.serve("8002")
    assert "2 servers are running: 8001, 8002; select one with --port" in machine.tool(
        "stop", code=2
    )
    assert "stopped  8002 (3" in machine.tool("stop", "--port", "8002", "--kill")
    assert "stopped  8001 (3 processes)" in machine.tool("stop", "--kill")


def test_age_and_memory_of_a_server_are_listed(machine: ServerMachine) -> None:
    machine.serve("8001")
    (listed,) = msgspec.json.decode(machine.tool("ps", "--json"))["places"]
    assert listed["age_s"] > 0
    assert listed["memory_bytes"] > 1 << 20
    assert ", up " in machine.tool("ps")
