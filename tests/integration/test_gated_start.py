"""Processes that are started while the model is still checked wait, or end without a trace."""

from __future__ import annotations

import os
import select
import sys

import pytest

from protocol.exit_codes import ExitCode
from protocol.start_gate import VARIABLE, StartGate, wait_at_gate
from tests.support.processes import is_alive
from tools.failure import Failure
from tools.processes.children import Child, Command
from tools.processes.gated_start import GatedStart

PROGRAM = """
import os, subprocess, sys
from protocol.start_gate import gate_descriptors, wait_at_gate
inner = "import os; from protocol.start_gate import *; os.write(1, b'waits'); wait_at_gate()"
child = subprocess.Popen([sys.executable, "-c", inner], pass_fds=gate_descriptors())
wait_at_gate()
child.wait()
os.write(1, b"continues")
"""


def command() -> Command:
    return Command("waiting", [sys.executable, "-c", PROGRAM])


def wait_for_output(child: Child) -> bytes:
    select.select([child.output], [], [])
    return os.read(child.output, 100)


def test_a_process_and_its_child_continue_when_the_block_ends() -> None:
    with GatedStart() as start:
        start.start([command(), command()])
        for child in start.children:
            assert wait_for_output(child) == b"waits"
    for child in start.children:
        assert wait_for_output(child) == b"continues"
        select.select([child.pidfd], [], [])
        assert child.reap().code == ExitCode.OK


def test_a_failure_kills_the_processes_without_output(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failure, match="refused"), GatedStart() as start:  # noqa: PT012
        start.start([command()])
        assert wait_for_output(start.children[0]) == b"waits"
        raise Failure("refused")
    assert not is_alive(start.children[0].pid)
    assert capfd.readouterr() == ("", "")


def test_a_waiting_process_reports_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = StartGate()
    inherited = os.dup(gate.fd)
    monkeypatch.setenv(VARIABLE, str(inherited))
    wait_at_gate(gate.open, every_s=0.001)
    os.close(inherited)
