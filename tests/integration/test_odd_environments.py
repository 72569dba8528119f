"""Commands in environments that lack something, or have odd names: they work, or fail in one
line."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.commands import run_command
from tests.support.gateway_process import CONFIG, GatewayProcess
from tests.support.ports import free_port
from tests.support.processes import ROOT
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny_checkpoint import write_tiny_llama

LATIN = os.fsdecode("größe".encode("latin-1"))


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands as a user that the system does not list, without $HOME."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "TIDEGATE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("command", ["serve", "config", "doctor", "models", "pull smollm2-135m"])
def test_without_a_home_one_line_names_the_variable_to_set(
    capfd: pytest.CaptureFixture[str], command: str
) -> None:
    ran = run_command(capfd, *command.split())
    (line,) = ran.err.splitlines()
    assert "no home directory" in line
    assert "$TIDEGATE_HOME" in line
    assert ran.code == ExitCode.USAGE


@pytest.mark.usefixtures("homeless")
def test_without_a_home_a_path_that_needs_it_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    for words in (["serve", "~/model"], ["serve", "--config", "~/t.toml"], ["models"]):
        ran = run_command(capfd, *words)
        if words == ["models"]:
            assert ran.code == 0, "the variable suffices"
        else:
            (line,) = ran.err.splitlines()
            assert "the home directory is not known" in line
            assert ran.code == ExitCode.USAGE


def test_the_home_of_an_unknown_user_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ran = run_command(capfd, "serve", "~no-such-user-here/model")
    (line,) = ran.err.splitlines()
    assert line.startswith("tidegate: ~no-such-user-here/model: ")
    assert ran.code == ExitCode.USAGE


WITHOUT_SHM = """
import os, sys
mount = 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$0" "$@"'
os.execvp("unshare", ["unshare", "--mount", "sh", "-c", mount, sys.executable, "-P", *sys.argv[1:]])
"""
GUNICORN = ["-m", "gunicorn", "-c", str(CONFIG), "gateway.app:create_app()"]


def test_a_gateway_starts_although_dev_shm_is_read_only(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("only root can mount a file system")
    address = f"ipc://{tmp_path}/e"
    with (
        ScriptedEngine(address),
        GatewayProcess(command=["-c", WITHOUT_SHM, *GUNICORN], engine=address) as gateway,
    ):
        gateway.await_ready()


@pytest.mark.parametrize("how", ["argument", "directory", "home"])
def test_a_name_that_is_not_utf_8_is_refused_in_one_line(tmp_path: Path, how: str) -> None:
    odd = tmp_path / LATIN
    odd.mkdir()
    model = write_tiny_llama(odd if how != "home" else tmp_path)
    given = {"argument": str(model), "directory": ".", "home": str(model)}[how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if how == "home":
        environment["TIDEGATE_HOME"] = str(odd)
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "tools", "serve", given, f"--port={free_port()}"],
        cwd=odd if how == "directory" else tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        timeout=120,
    )
    (line,) = ran.stderr.decode().splitlines()
    assert "is not UTF-8" in line
    assert "gr\\udcf6\\udcdfe" in line
    assert ran.returncode == ExitCode.USAGE
    assert ran.stdout == b""
