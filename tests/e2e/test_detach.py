"""`tidegate serve --detach`: the server goes on in the background, where other commands find it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.ports import free_port
from tests.support.processes import ROOT, Program, is_alive
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

TOOL = ["-P", "-m", "tools"]


class DetachedServer:
    """A port for a server in the background, with directories of its own."""

    def __init__(self, folder: Path, model: str) -> None:
        self.port = free_port()
        self._model = model
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        self.base = runtime / f"tidegate-{os.getuid()}"
        self.environment = {"XDG_RUNTIME_DIR": str(runtime), "TIDEGATE_HOME": str(folder / "home")}

    @property
    def words(self) -> list[str]:
        return ["serve", self._model, "--port", str(self.port), "--detach"]

    def tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.environment}
        command = [sys.executable, *TOOL, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)

    def start(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Start the server. The call returns when nothing holds its output any more."""
        return self.tool(*self.words, *options)


@pytest.fixture
def server(tmp_path: Path, babbling_model: str) -> DetachedServer:
    return DetachedServer(tmp_path, babbling_model)


def test_other_commands_find_a_server_in_the_background(server: DetachedServer) -> None:
    started = server.start()
    try:
        assert started.returncode == 0, started.stderr
        assert f"at http://127.0.0.1:{server.port}  (ready in" in started.stdout
        assert f"stop:  tidegate stop {server.port}" in started.stdout
        assert f"({server.base}/{server.port}/server.log)" in started.stdout
        assert "engine ready" in started.stderr, "the progress of the start is shown"
        assert server.tool("status").returncode == 0
        assert "engine ready" in server.tool("logs", str(server.port)).stdout
        assert f"port     {server.port}: serves" in server.tool("ps").stdout
    finally:
        stopped = server.tool("stop", "--all")
    assert f"stopped  {server.port}" in stopped.stdout
    assert list(server.base.glob("*/pid")) == []


def test_the_log_of_a_server_that_ended_in_the_background_is_kept(server: DetachedServer) -> None:
    assert server.start().returncode == 0
    try:
        listed = server.tool("ps").stdout.splitlines()
        (engine,) = (line for line in listed if "engine" in line)
        os.kill(int(engine.partition("(pid ")[2].partition(")")[0]), signal.SIGKILL)
        assert eventually(lambda: list(server.base.glob("*/pid")) == [], within_s=60)
    finally:
        server.tool("stop", "--all")
    ended = server.tool("logs", str(server.port), "--level", "error")
    assert "engine was killed by SIGKILL" in ended.stdout
    assert ended.stderr == "the server has ended\n"


def test_a_start_that_fails_has_its_reason_and_its_exit_code(server: DetachedServer) -> None:
    wrong = server.start("--ngram-min", "9")
    assert wrong.returncode == ExitCode.USAGE
    assert wrong.stderr == "tidegate: --ngram-min (9) exceeds --ngram-max (8)\n"
    missing = server.tool("serve", "/none.gguf", "--port", str(server.port), "--detach")
    assert missing.returncode == ExitCode.BAD_MODEL
    assert "/none.gguf" in missing.stderr
    assert list(server.base.glob("*/pid")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_leaves_nothing_behind(
    number: signal.Signals, server: DetachedServer
) -> None:
    with Program([*TOOL, *server.words], environment=server.environment) as program:
        assert eventually(lambda: list(server.base.glob("*/pid")), within_s=60)
        (file,) = server.base.glob("*/pid")
        assert eventually(lambda: file.read_text().split("\n")[0])
        pid = int(file.read_text().split("\n")[0])
        assert pid != program.process.pid
        program.signal(number)
        assert program.end() == 128 + number
        assert eventually(lambda: not is_alive(pid), within_s=60)
    assert list(server.base.glob("*/pid")) == []
