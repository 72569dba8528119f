"""`tidegate launch`: each agent gets the settings that the printed command has, and nothing is
written to the user's own settings."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.processes import ROOT
from tests.support.scripted_engine import ScriptedEngine
from tools.agents import AGENTS, AgentServer
from tools.commands.launch import command_text

ENGINE = {"max_len": 40_000}
GATEWAY = {"served_name": ["tg-model", "other"], "api_key": ["k'ey"]}
AGENT = f"""#!{sys.executable}
import json, os, pathlib, sys
words, files = sys.argv[1:], {{}}
if "--data-dir" in words:
    place = words.index("--data-dir") + 1
    folder, words[place] = pathlib.Path(words[place]), "FOLDER"
    files = {{str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.json")}}
print(json.dumps({{"words": words, "environment": dict(os.environ), "files": files}}))
sys.exit(7)
"""
WAITING_AGENT = f"""#!{sys.executable}
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(os.write(1, b"terminated\\n") and 0))
os.write(1, b"waiting\\n")
signal.pause()
"""


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which each agent is a program that prints its settings."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        program = folder / agent.program
        program.write_text(AGENT)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    home = tmp_path / "home"
    home.mkdir()
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(home),
        "TIDEGATE_API_KEY": "k'ey",
        "PYTHONPATH": str(ROOT),
    }


def launch(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidegate", "launch", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def settings(output: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return what a launched program printed, with only the variables that the launch added."""
    printed: dict[str, Any] = json.loads(output)
    added = printed["environment"].items() - environment.items()
    ignored = {"PWD", "SHLVL", "_", "LC_CTYPE", "OLDPWD"}
    return {**printed, "environment": {k: v for k, v in added if k not in ignored}}


@pytest.mark.parametrize("name", AGENTS)
def test_the_printed_command_starts_the_agent_as_a_launch_does(
    engine: ScriptedEngine, gateway: GatewayProcess, programs: dict[str, str], name: str
) -> None:
    selected = (name, "--url", gateway.url, "--model", "other")
    started = launch(programs, *selected, "--", "do it", "--flag")
    assert started.returncode == 7, started.stderr
    printed = launch(programs, *selected, "--print", "--", "do it", "--flag")
    assert printed.returncode == 0, printed.stderr
    assert "k'ey" not in printed.stdout, "the key stays secret"
    shell = subprocess.run(
        ["sh", "-c", printed.stdout], env=programs, capture_output=True, text=True, check=False
    )
    found = settings(started.stdout, programs)
    assert found == settings(shell.stdout, programs)
    assert found["words"][-2:] == ["do it", "--flag"]
    everything = json.dumps(found)
    for part in (gateway.url, "other", "k'ey"):
        assert part in everything or part in programs.values()
    assert list(Path(programs["HOME"]).rglob("*")) == []


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("key", ["k\"e\\y'", "k\\", '"'])
def test_a_printed_command_hides_and_passes_a_key_that_json_escapes(
    programs: dict[str, str], name: str, key: str
) -> None:
    agent = AGENTS[name]
    session = agent.session(AgentServer("http://127.0.0.1:1", "model", 100, key))
    printed = command_text(agent, session, [], key)
    if len(key) > 1:
        assert key not in printed
        assert json.dumps(key)[1:-1] not in printed
    environment = {**programs, "TIDEGATE_API_KEY": key}
    shell = subprocess.run(
        ["sh", "-c", printed], env=environment, capture_output=True, text=True, check=False
    )
    found = json.loads(shell.stdout)
    assert found["files"] == session.files
    assert {each: found["environment"][each] for each in session.environment} == session.environment


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_launch_that_is_terminated_ends_the_agent_and_removes_the_key(
    engine: ScriptedEngine,
    gateway: GatewayProcess,
    programs: dict[str, str],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    agent = tmp_path / "bin" / "cline"
    agent.write_text(WAITING_AGENT)
    folder = tmp_path / "private"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "tidegate", "launch", "cline", "--url", gateway.url],
        env={**programs, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        assert len(list(folder.iterdir())) == 1
        process.send_signal(number)
        assert process.stdout.read() == "terminated\n"
    assert process.returncode == 128 + number
    assert list(folder.iterdir()) == []


def test_the_first_model_is_the_default_and_its_context_is_told(
    engine: ScriptedEngine, gateway: GatewayProcess, programs: dict[str, str]
) -> None:
    started = launch(programs, "codex", "--url", gateway.url)
    words = json.loads(started.stdout)["words"]
    assert 'model="tg-model"' in words
    assert "model_context_window=40000" in words


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("codex", "--model", "lost"), 2, "has tg-model, other"),
        (("nobody",), 2, "codex"),
        (("codex", "--api-key", "wrong"), 1, "requires a valid API key"),
    ],
)
def test_what_cannot_be_launched_is_explained(
    engine: ScriptedEngine,
    gateway: GatewayProcess,
    programs: dict[str, str],
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    found = launch(programs, *words, "--url", gateway.url)
    assert found.returncode == code
    assert message in found.stderr
    assert found.stdout == ""


def test_a_program_that_is_not_installed_is_named_with_its_installation(
    engine: ScriptedEngine, gateway: GatewayProcess, programs: dict[str, str]
) -> None:
    empty = {**programs, "PATH": str(Path(programs["HOME"]))}
    found = launch(empty, "cline", "--url", gateway.url)
    assert found.returncode == 127
    assert "npm install -g cline" in found.stderr
