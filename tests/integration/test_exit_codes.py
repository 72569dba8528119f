"""The exit codes of `tidegate serve` for errors that are found before any process starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.process.exit_codes import ExitCode
from tests.support.commands import run_command
from tests.support.ports import free_port
from tests.support.processes import ROOT
from tests.support.tiny_checkpoint import write_tiny_llama
from tools.commands.serve import CONFIGS
from tools.flags import flags_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def serve(model: str, *options: str, **environment: str) -> tuple[int, str]:
    """Run `tidegate serve` in a new process. Return its exit code and the one line that it prints,
    apart from the progress of a download."""
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "tools", "serve", model, f"--port={free_port()}", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert ran.stdout == "", "something was started"
    *progress, result = ran.stderr.splitlines()
    assert all("downloading" in line for line in progress if line), ran.stderr
    return ran.returncode, result


def serve_here(capfd: pytest.CaptureFixture[str], model: str, *options: str) -> tuple[int, str]:
    """Run `tidegate serve` in this process. Return its exit code and the one line it prints."""
    ran = run_command(capfd, "serve", model, f"--port={free_port()}", *options)
    assert ran.out == "", "something was started"
    (result,) = ran.err.splitlines()
    return ran.code, result


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tool-format", "nosuch"], "no tool format 'nosuch'"),
        (["--reasoning-format", "nosuch"], "no reasoning format 'nosuch'"),
        (["--default-chat-template-kwargs", "{bad"], "--default-chat-template-kwargs: .*malformed"),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs: "),
        (["--default-sampling", "{bad"], "default.sampling"),
        (["--render-only", "--split"], "cannot be combined"),
        (["--max-slots", "no"], "--max-slots must be"),
    ],
)
def test_a_wrong_option_is_reported_in_one_line_with_code_2(
    capfd: pytest.CaptureFixture[str], model: Path, options: list[str], words: str
) -> None:
    code, result = serve_here(capfd, str(model), *options)
    assert re.search(words, result), result
    assert code == ExitCode.USAGE


PATH_OPTIONS = {
    flag.name: flag for _, config in CONFIGS for flag in flags_of(config) if flag.is_path
}
UNUSABLE = {
    "file": [("{there}/none", "No such file or directory"), ("{there}", "Is a directory")],
    "directory": [
        ("{there}/none", "No such file or directory"),
        ("{there}/file", "Not a directory"),
    ],
    "new file": [
        ("{there}/file/new", "File exists"),
        ("{there}", "Is a directory"),
        ("/proc/none/new", "No such file or directory"),
    ],
    "new directory": [
        ("{there}/file", "File exists"),
        ("{there}/file/new", "Not a directory"),
        ("/proc/none", "No such file or directory"),
    ],
}
"""What an option takes -> paths that it cannot use, and the cause that the system reports."""


@pytest.mark.parametrize(
    ("option", "path", "cause"),
    [(name, *row) for name, flag in PATH_OPTIONS.items() for row in UNUSABLE[flag.path]],
)
def test_a_path_that_cannot_be_used_is_reported_with_its_option_and_the_cause(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: Path,
    option: str,
    path: str,
    cause: str,
) -> None:
    (tmp_path / "file").touch()
    wrong = path.format(there=tmp_path)
    code, result = serve_here(capfd, str(model), option, wrong)
    assert re.search(rf"^tidegate: {option} {wrong}: cannot [a-z ]+: {cause}(;|$)", result), result
    assert code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("base", "cause"),
    [("/proc/none", "No such file or directory"), ("/dev/null/none", "Not a directory")],
)
def test_a_run_directory_that_cannot_be_made_is_not_taken_for_a_running_server(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    base: str,
    cause: str,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    code, result = serve_here(capfd, str(model))
    assert result.startswith(
        f"tidegate: XDG_RUNTIME_DIR={base}: cannot use the run directory {base}/tidegate-"
    )
    assert result.endswith(cause)
    assert code == ExitCode.FAILED


def test_a_host_that_is_not_of_this_machine_is_code_6(
    capfd: pytest.CaptureFixture[str], model: Path
) -> None:
    code, result = serve_here(capfd, str(model), "--host", "192.0.2.7", "--insecure-no-auth")
    assert "cannot listen on 192.0.2.7" in result
    assert code == ExitCode.IN_USE


def test_a_missing_model_is_code_5() -> None:
    code, result = serve("/no/model")
    assert "/no/model" in result
    assert code == ExitCode.BAD_MODEL


REPLACED = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000}
SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
REMEDY = "fetch the model's files again"


@pytest.mark.parametrize(
    ("option", "damage", "words"),
    [
        ((), lambda whole: whole[:-20], f"tokenizer.json is not valid JSON.*{REMEDY}"),
        ((), lambda whole: "[]", "tokenizer.json"),
        ((), lambda whole: json.dumps(json.loads(whole) | {"model": {}}), f"tokenizer.*{REMEDY}"),
        (
            (),
            lambda whole: json.dumps(json.loads(whole) | {"normalizer": REPLACED}),
            f"its normalizer can expand one character to more than 64; {REMEDY}",
        ),
        (
            ("--render-only",),
            lambda whole: json.dumps(json.loads(whole) | {"pre_tokenizer": SPLIT}),
            f"the model's tokenizer cannot be used: .*; {REMEDY}",
        ),
    ],
    ids=["cut-off", "no-object", "no-model", "exploding", "rendered-wrong-pattern"],
)
def test_a_tokenizer_that_cannot_be_used_is_code_5_before_anything_is_started(
    tmp_path: Path, option: tuple[str, ...], damage: Callable[[str], str], words: str
) -> None:
    file = write_tiny_llama(tmp_path) / "tokenizer.json"
    file.write_text(damage(file.read_text()))
    code, result = serve(str(tmp_path), *option)
    assert re.search(words, result), result
    assert code == ExitCode.BAD_MODEL


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--tool-format", "lfm2", r"neither the vocabulary nor .* has <\|tool_call_start\|>"),
        ("--tool-format", "hf", "the model's checkpoint has no response_template"),
        ("--reasoning-format", "hf", "the model's checkpoint has no response_template"),
    ],
)
def test_a_format_that_the_model_cannot_write_is_code_2_before_anything_is_started(
    model: Path, option: str, name: str, words: str
) -> None:
    code, result = serve(str(model), option, name)
    remedy = f"; serve with {option} auto, or name the format of this model"
    assert re.search(f"{option} {name}: {words}.*{remedy}$", result), result
    assert code == ExitCode.USAGE


def test_a_download_that_fails_is_code_10(tmp_path: Path) -> None:
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}
    code, result = serve("smollm2-135m", TIDEGATE_HOME=str(tmp_path), **nowhere)
    assert "cannot download smollm2-135m" in result
    assert code == ExitCode.NO_DOWNLOAD


def test_every_code_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "operate" / "health.md").read_text()
    for code in ExitCode:
        assert re.search(rf"^\| {code.value} \| ", text, re.MULTILINE), code
