"""The probe of an engine without a gateway, and what the supervisor concludes from its answers."""

from __future__ import annotations

from pathlib import Path

from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import eventually
from tools.http.web import ServerReadiness
from tools.processes.engine_probe import EngineProbe
from tools.processes.readiness import ChildReadiness
from tools.processes.serve_commands import engine_command


def test_an_engine_is_ready_once_it_answers_and_again_after_a_restart(tmp_path: Path) -> None:
    """The supervisor asks for readiness until each process is ready. An answer of an engine's old
    process does not count as one of its new process."""
    config = EngineConfig(
        address=f"ipc://{tmp_path}/engine.sock", worker=WorkerConfig(model="scripted", address="")
    )
    probe = EngineProbe(config, "test")
    command = engine_command("engine", config, lock=0)
    children = ChildReadiness({command.name: command.address})
    assert probe.readiness() is None

    with ScriptedEngine(config.address):
        before = eventually(probe.readiness)
        assert isinstance(before, ServerReadiness)
        assert children.ready(before) == ["engine"]
        children.on_start("engine")
        assert children.ready(before) == []

    with ScriptedEngine(config.address):
        after = eventually(probe.readiness)
        assert isinstance(after, ServerReadiness)
        assert children.ready(after) == ["engine"]
