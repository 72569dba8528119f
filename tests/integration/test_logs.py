"""`tidegate logs` with a real server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest
import requests

from protocol.process.exit_codes import ExitCode
from tests.support.commands import run_command
from tests.support.ports import free_port
from tests.support.processes import Program
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.waiting import eventually
from tools.processes.server_log import LOG_FILE

CANARY = "canary-in-the-prompt"
FOLLOW = ["-P", "-m", "tools", "logs", "-f"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test run directories of its own, and return their parent."""
    (tmp_path / "r").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))
    return tmp_path / "r" / f"tidegate-{os.getuid()}"


def serve(model: Path, port: int, *words: str) -> Program:
    command = ["-P", "-m", "tools", "serve", str(model), "--port", str(port), "--max-slots", "2"]
    return Program([*command, "--response-store", "none", *words])


@pytest.fixture
def server(model: Path, runtime: Path) -> Iterator[tuple[Program, str]]:
    port = free_port()
    with serve(model, port) as program:
        program.line_with("ZeroMQ:")
        yield program, f"http://127.0.0.1:{port}"


def ask(url: str, request_id: str) -> None:
    body: dict[str, Any] = {"prompt": [3, 4], "max_tokens": 2, "user": CANARY}
    headers = {"X-Request-Id": request_id}
    assert requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30).ok


def test_the_log_has_the_lines_of_all_processes_and_no_prompt(
    server: tuple[Program, str], runtime: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program, url = server
    ask(url, "first")
    ask(url, "second")
    file = runtime / url.rpartition(":")[2] / LOG_FILE
    assert eventually(lambda: "id=second" in file.read_text())
    assert file.stat().st_mode & 0o777 == 0o600
    shown = run_command(capfd, "logs", "-n", "all")
    assert (shown.code, shown.err) == (0, "")
    for name in (" tidegate[", " gateway[", " engine[", " worker["):
        assert name in shown.out
    assert "Tidegate serves" in shown.out
    printed = {line for line in [*program.out, *program.err] if line[2:3] == ":"}
    assert printed <= set(shown.out.splitlines())
    assert CANARY not in shown.out
    one = run_command(capfd, "logs", "--request", "cmpl-first").out
    assert "id=first" in one
    assert one.count("\n") == 1
    last = run_command(capfd, "logs", "-n", "1").out
    assert "id=second" in last
    assert last.count("\n") == 1


def test_it_is_followed_until_the_server_ends(server: tuple[Program, str]) -> None:
    program, url = server
    with Program([*FOLLOW, "-n", "0"]) as followed, Program(FOLLOW) as interrupted:
        interrupted.line_with("Tidegate serves")
        interrupted.signal(SIGINT)
        assert interrupted.end() == 0
        assert interrupted.err == []

        def is_followed() -> bool:
            ask(url, "later")
            return any("id=later" in line for line in followed.out)

        assert eventually(is_followed)
        assert not any("Tidegate serves" in line for line in followed.out)
        program.signal(SIGTERM)
        assert program.end() == ExitCode.OK
        assert followed.end() == 0
        assert followed.err == ["the server has ended"]
        assert any("stopping: open requests may finish" in line for line in followed.out)


def test_a_terminal_gets_colours(server: tuple[Program, str]) -> None:
    command = [sys.executable, "-P", "-m", "tools", "logs"]
    with PseudoTerminal(command, environment={"TERM": "xterm", "NO_COLOR": ""}) as terminal:
        assert eventually(lambda: terminal.shows("\x1b[32mINFO\x1b[0m")), terminal.text


def test_a_server_can_run_without_a_log(
    model: Path, runtime: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with serve(model, port, "--log-file-mib", "0") as program:
        program.line_with("ZeroMQ:")
        done = run_command(capfd, "logs", str(port))
        assert done == (1, "", f"tidegate: {port} has no log; running: none\n")
        assert "no running server has a log" in run_command(capfd, "logs").err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "many"], "-n/--lines must be a whole number or all, not 'many'"),
        (["--level", "loud"], "--level invalid choice: 'loud'"),
    ],
)
def test_a_wrong_option_is_one_line(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run_command(capfd, "logs", *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert message in done.err


@pytest.mark.parametrize("name", ["../x", "/etc", "nothing"])
def test_a_name_is_not_a_path(name: str, runtime: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(capfd, "logs", name).code == 1
