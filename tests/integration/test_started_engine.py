"""`tidegate engine` as a child of another process, as the launcher of a cluster starts it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from protocol.sdk.client import Client
from protocol.wire.cluster_key import write_cluster_key
from protocol.wire.errors import EngineLost
from tests.support.ports import free_port
from tests.support.processes import Program, descendants_of, is_alive
from tests.support.server import START_TIMEOUT_S
from tests.support.tiny_checkpoint import write_roomy_llama
from tests.support.waiting import eventually

STARTER = """
import select, sys
from tools.processes.children import Child, Command, module_command
child = Child(Command("engine", module_command("tools", "engine", *sys.argv[1:])))
while child.relay():
    select.select([child.output], [], [])
"""


def test_an_engine_whose_starter_is_killed_ends_at_once(tmp_path: Path) -> None:
    """A drain could take long, and the engine of the next attempt needs its place."""
    model = write_roomy_llama(tmp_path)
    key, address = str(tmp_path / "key"), f"tcp://127.0.0.1:{free_port()}"
    write_cluster_key(key)
    where = ["--address", address, "--cluster-key", key, "--threads", "1"]
    with Program(["-P", "-c", STARTER, str(model), *where]) as starter:
        starter.line_with("This engine serves", timeout_s=START_TIMEOUT_S, on_stderr=True)
        pids = [pid for pid, _ in descendants_of(starter.process.pid)]
        assert len(pids) >= 3, "tidegate engine, its engine and its worker"
        with Client(address, cluster_key=key) as engine:
            answer = engine.generate([5], max_tokens=16_000, ignore_eos=True)
            next(answer)
            starter.signal(signal.SIGKILL)
            with pytest.raises(EngineLost, match="another process of its server failed"):
                answer.tokens()
        assert eventually(lambda: not any(map(is_alive, pids)))


def test_an_engine_that_was_started_by_hand_may_outlive_its_shell() -> None:
    code = """if True:
        import ctypes, signal
        from protocol.process.lifeline import attach_if_supervised
        attach_if_supervised(signal.SIGTERM)
        at_parents_death = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(2, ctypes.byref(at_parents_death))  # PR_GET_PDEATHSIG
        print(at_parents_death.value)
        """
    with Program(["-P", "-c", code]) as program:
        assert program.end() == 0
        assert program.out == ["0"]
