"""deploy/Dockerfile, as far as it can be run without a container runtime: its shell commands with
recorded programs, the files that it copies, and its entry point and health check as processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from signal import SIGTERM

import pytest
import requests

from protocol.process.exit_codes import ExitCode
from tests.support.dockerfile import (
    DOCKERFILE,
    ROOT,
    copied,
    entrypoint,
    health_check,
    instructions,
)
from tests.support.ports import free_port
from tests.support.processes import Program
from tests.support.tiny_checkpoint import write_tiny_llama

PIP = "/opt/tidegate/bin/pip"


def test_the_linter_accepts_the_dockerfile() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed")
    rules = DOCKERFILE.with_name("hadolint.yaml")
    ran = subprocess.run(
        [linter, "--no-color", "--config", rules, DOCKERFILE], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


# ---- the files
def is_sent(path: str) -> bool:
    """Return whether .dockerignore lets a file of the source tree through. The last pattern that
    matches the file, or a folder above it, decides."""
    folders = [path, *map(str, Path(path).parents)][:-1]
    decision = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        names = [Path(each).name for each in folders] if "**/" in line else folders
        if any(fnmatch(name, pattern) for name in names):
            decision = line.startswith("!")
    return decision


def tracked() -> list[str]:
    ran = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in ran.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_builder_gets_what_the_image_copies_and_nothing_else() -> None:
    sources = {source for sources, _ in copied() for source in sources}
    for name in tracked():
        assert is_sent(name) == (Path(name).parts[0] in sources), name
    assert not is_sent("worker/kernels/_avx2.cpython-311-x86_64-linux-gnu.so")
    assert not is_sent("tools/__pycache__/flags.cpython-311.pyc")
    assert not is_sent(".venv/bin/python")


def test_what_the_image_copies_is_a_whole_installation(tmp_path: Path) -> None:
    for sources, destination in copied():
        for source in sources:
            target = tmp_path / (source if destination == "./" else destination)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target)
            else:
                shutil.copy(ROOT / source, target)
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert rooms <= {path.name for path in tmp_path.iterdir()}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for words in (
        ["-c", "import gateway.app, worker.process, simulator.__main__"],
        ["-m", "tools", "serve", "--help"],
    ):
        ran = subprocess.run(
            [sys.executable, "-P", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr


# ---- the shell commands
def run_step(words: str, program: str, device: str, folder: Path) -> tuple[int, list[list[str]]]:
    """Run the RUN instruction with `words` in it. Return its exit code, and the arguments of each
    call of `program`, which does nothing."""
    (step,) = [value for value in instructions("RUN") if words in value]
    recorder = folder / "recorder"
    calls = folder / "calls"
    calls.write_text("")
    recorder.write_text(f'#!/bin/sh\nprintf "%s\\037" "$@" >> {calls}; echo >> {calls}\n')
    recorder.chmod(0o755)
    step = step.replace(program, str(recorder)).replace("rm -rf", "true")
    ran = subprocess.run(["sh", "-c", step], env={**os.environ, "DEVICE": device}, cwd=folder)
    lines = calls.read_text().splitlines()
    return ran.returncode, [line.split("\037")[:-1] for line in lines]


@pytest.mark.parametrize(("device", "extras"), [("cpu", "all"), ("gpu", "all,cuda")])
def test_a_build_argument_selects_the_packages_of_a_device(
    device: str, extras: str, tmp_path: Path
) -> None:
    code, (call,) = run_step("pip install", PIP, device, tmp_path)
    assert code == 0
    assert call[0] == "install"
    assert call[-1] == f".[{extras}]"
    assert any("whl/cpu" in word for word in call) == (device == "cpu")
    known = re.findall(r'^        "(\w+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)


def test_an_unknown_device_ends_the_build(tmp_path: Path) -> None:
    assert run_step("pip install", PIP, "tpu", tmp_path) == (2, [])


@pytest.mark.parametrize(("device", "compiler"), [("cpu", []), ("gpu", ["gcc", "libc6-dev"])])
def test_only_an_image_for_gpus_has_a_compiler(
    device: str, compiler: list[str], tmp_path: Path
) -> None:
    _, (update, install) = run_step("tini", "apt-get", device, tmp_path)
    assert update == ["update"]
    assert install[-1 - len(compiler) :] == ["tini", *compiler]


# ---- the processes
def test_a_container_serves_is_healthy_and_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path / "home"))
    program, *words = entrypoint()
    check_program, *check_words = health_check()
    assert program == check_program == "tidegate"
    (tmp_path / "model").mkdir()
    model, port = write_tiny_llama(tmp_path / "model"), free_port()
    key = {"TIDEGATE_API_KEY": "sk-of-the-container"}

    def is_healthy() -> bool:
        command = [sys.executable, "-P", "-m", "tools", *check_words]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    assert not is_healthy()
    command = ["-P", "-m", "tools", *words, str(model), "--port", str(port)]
    with Program(command, environment=key) as server:
        server.line_with("Tidegate serves")
        assert is_healthy()
        models = f"http://127.0.0.1:{port}/v1/models"
        assert requests.get(models, timeout=10).status_code == 401
        server.signal(SIGTERM)
        assert server.end() == ExitCode.OK, server.output
    assert not is_healthy()


def test_a_container_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEGATE_API_KEY", raising=False)
    with Program(["-P", "-m", "tools", *entrypoint()[1:], "--port", str(free_port())]) as server:
        assert server.end() == ExitCode.USAGE
