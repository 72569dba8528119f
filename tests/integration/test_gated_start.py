"""Processes that are started while the model is still checked wait for the result. If the check
fails, they end without output."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from protocol.process.exit_codes import ExitCode
from protocol.process.start_gate import VARIABLE, StartGate, wait_at_gate
from tests.support.processes import is_alive
from tests.support.waiting import HANG_S, eventually
from tools.failure import Failure
from tools.processes.children import Child, Command
from tools.processes.gated_start import GatedStart

PROGRAM = """
import os, subprocess, sys
from protocol.process.start_gate import gate_descriptors, wait_at_gate
inner = "from protocol.process.start_gate import *;"
inner += "os.write(1, b'%d' % os.getpid()); wait_at_gate()"
child = subprocess.Popen([sys.executable, "-c", inner], pass_fds=gate_descriptors())
wait_at_gate()
child.wait()
os.write(1, b"continues")
"""

OWNER = f"""
import os, subprocess, sys
from protocol.process.start_gate import StartGate
gate = StartGate()
environment = {{**os.environ, **gate.environment}}
command = [sys.executable, "-c", {PROGRAM!r}]
subprocess.run(command, env=environment, pass_fds=[gate.fd])
"""


def command() -> Command:
    return Command("waiting", [sys.executable, "-c", PROGRAM])


def wait_for_output(child: Child) -> bytes:
    select.select([child.output], [], [], HANG_S)
    return os.read(child.output, 100)


def test_processes_and_their_children_continue_when_the_block_ends() -> None:
    with GatedStart() as start:
        start.start([command(), command()])
        for child in start.children:
            assert is_alive(int(wait_for_output(child)))
    for child in start.children:
        assert wait_for_output(child) == b"continues"
        select.select([child.pidfd], [], [])
        assert child.reap().code == ExitCode.OK


def test_a_failure_kills_the_processes_without_output(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failure, match="refused"), GatedStart() as start:  # noqa: PT012
        start.start([command()])
        grandchild = int(wait_for_output(start.children[0]))
        raise Failure("refused")
    assert not is_alive(start.children[0].pid)
    assert eventually(lambda: not is_alive(grandchild))
    assert capfd.readouterr() == ("", "")


def test_a_stop_signal_in_the_check_kills_the_processes() -> None:
    with pytest.raises(Failure, match="SIGTERM") as raised:  # noqa: PT012, SIM117
        with GatedStart() as start, start.interruptible():
            start.start([command(), command()])
            signal.raise_signal(signal.SIGTERM)
    assert raised.value.exit_code == 128 + signal.SIGTERM
    assert not any(is_alive(child.pid) for child in start.children)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_stop_signal_outside_the_check_is_raised_at_the_end_of_the_block() -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with GatedStart() as start:
            signal.raise_signal(signal.SIGINT)
            start.start([command()])
            signal.raise_signal(signal.SIGINT)
    assert not is_alive(start.children[0].pid)


def test_the_processes_exit_without_output_when_the_supervisor_is_killed() -> None:
    arguments = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as owner:
        assert owner.stdout is not None
        assert is_alive(int(owner.stdout.read(100)))
        owner.kill()
        assert owner.stdout.read() == b""  # its end shows that all processes have ended


def test_an_abandoned_gate_ends_the_process_with_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = StartGate()
    inherited = os.dup(gate.fd)
    monkeypatch.setenv(VARIABLE, str(inherited))
    gate.close()
    with pytest.raises(SystemExit) as raised:
        wait_at_gate()
    assert raised.value.code == ExitCode.FAILED
    os.close(inherited)


def test_a_waiting_process_reports_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = StartGate()
    inherited = os.dup(gate.fd)
    monkeypatch.setenv(VARIABLE, str(inherited))
    reports: list[bool] = []

    def keep_alive() -> None:
        reports.append(True)
        gate.open()

    wait_at_gate(keep_alive, every_s=0.001)
    os.close(inherited)
    assert reports
