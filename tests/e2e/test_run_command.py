"""`tidegate run` with real servers: one that runs already, and one that it starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from signal import SIGINT, SIGKILL

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.processes import ROOT, Program, descendants_of, is_alive
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.server import Server
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

TOOL = ["-P", "-m", "tools", "run"]
SHORT = ["--max-tokens", "5", "--temperature", "0"]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test run directories of its own, and return their parent."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory / f"tidegate-{os.getuid()}"


def run(*words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *TOOL, *words]
    return subprocess.run(command, input=said, capture_output=True, text=True, cwd=ROOT)


def servers(runtime: Path) -> list[str]:
    """Return the names of the run directories of servers."""
    return [path.parent.name for path in runtime.glob("*/pid")]


def test_a_server_is_started_for_one_answer_and_ends_with_it(
    babbling_model: str, runtime: Path
) -> None:
    first = run(babbling_model, *SHORT, said="hello")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.strip()
    assert run(babbling_model, "hello", *SHORT).stdout == first.stdout
    assert servers(runtime) == []


def test_without_a_prompt_a_terminal_has_a_chat_whose_server_ends_with_it(
    babbling_model: str, runtime: Path, tmp_path: Path
) -> None:
    home = {"TIDEGATE_HOME": str(tmp_path / "home"), "TERM": "xterm"}
    command = [sys.executable, *TOOL, babbling_model, "--max-tokens", "5"]
    with PseudoTerminal(command, environment=home) as terminal:
        assert eventually(lambda: terminal.shows("Ctrl-D ends"), within_s=180), terminal.text
        assert servers(runtime)
        terminal.press(b"hello\n")
        assert eventually(lambda: terminal.shows("length]")), terminal.text
        terminal.press(b"/quit\n")
        assert terminal.process.wait(60) == 0
    assert servers(runtime) == []


def test_options_of_the_server_come_from_a_file(
    babbling_model: str, runtime: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text("max_len = 16\n")
    ran = run(babbling_model, "a long message " * 20, *SHORT, "--config", str(file))
    assert ran.returncode == ExitCode.FAILED
    assert "16" in ran.stderr


def test_a_server_that_does_not_start_is_reported_with_its_cause(
    babbling_model: str, runtime: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text("ngram_min = 9\n")
    ran = run(babbling_model, "hello", "--config", str(file))
    assert (ran.returncode, ran.stdout) == (ExitCode.USAGE, "")
    assert ran.stderr == (f"tidegate: --ngram-min (9) exceeds --ngram-max (8)  ({file}:1)\n")


@pytest.mark.parametrize("number", [SIGINT, SIGKILL])
def test_its_server_ends_with_a_command_that_is_interrupted(
    number: int, babbling_model: str, runtime: Path
) -> None:
    words = [*TOOL, babbling_model, "hello", "--max-tokens", "100000"]
    with Program(words) as program:
        assert eventually(lambda: servers(runtime), within_s=60)
        family = descendants_of(program.process.pid)
        assert family
        program.process.send_signal(number)
        assert program.end() == (130 if number == SIGINT else -SIGKILL)
        assert program.out == []
        assert eventually(lambda: not any(is_alive(pid) for pid, _ in family), within_s=60)
    assert eventually(lambda: servers(runtime) == [], within_s=60)


def test_a_running_server_that_has_the_model_answers(babbling_model: str, runtime: Path) -> None:
    with Server("--served-name", "babbler", model=babbling_model) as server:
        ran = run("babbler", "hello", *SHORT)
        assert ran.returncode == 0, ran.stderr
        server.line_with("POST /v1/chat/completions 200", on_stderr=True)
        assert servers(runtime) == [str(server.port)]
