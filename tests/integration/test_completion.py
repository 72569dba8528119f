"""The completion scripts, in the shells themselves. A shell that is not installed is skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.shells import Shell, install
from tests.support.waiting import eventually
from tools.__main__ import COMMANDS, main
from tools.commands.completion import SHELLS, script
from tools.processes import run_lock
from tools.processes.run_lock import LockFacts

RANDOM_PORT = 8123


@pytest.fixture(scope="module", params=SHELLS)
def shell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    """Yield a shell, for a user whose only server is on port 8123."""
    folder = tmp_path_factory.mktemp("shell")
    install(folder)
    runtime = tmp_path_factory.mktemp("r")
    runtime.chmod(0o700)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TIDEGATE_HOME": str(folder / "home"),
        "HF_HOME": str(folder / "hub"),
        "XDG_RUNTIME_DIR": str(runtime),
        "TERM": "xterm",
    }
    file = folder / "script"
    file.write_text(script(request.param))
    lock = run_lock.hold(runtime / f"tidegate-{os.getuid()}" / str(RANDOM_PORT))
    run_lock.describe(lock, LockFacts())
    yield Shell(request.param, file, environment)
    os.close(lock)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a working directory with a few files."""
    (tmp_path / "models").mkdir()
    for name in ("model.gguf", "template.jinja"):
        (tmp_path / name).touch()
    keys = tmp_path / "keys.toml"
    assert main(["keys", "add", str(keys), "alice"]) == 0
    return tmp_path


def found(shell: Shell, line: str, folder: Path) -> set[str]:
    return {each.strip().removesuffix("/") for each in shell.complete(line, folder)}


def test_all_commands_are_suggested(shell: Shell, folder: Path) -> None:
    names = {name.partition(" ")[0] for name in COMMANDS}
    assert found(shell, "tidegate ", folder) == names


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tidegate ser", {"serve"}),
        ("tidegate serve --max-l", {"--max-len", "--max-loaded", "--max-loras", "--max-lora-rank"}),
        ("tidegate serve --port 1 --max-sl", {"--max-slots"}),
        ("tidegate serve model.gguf --max-sl", {"--max-slots"}),
        ("tidegate serve --dtype ", {"auto", "bfloat16", "float32"}),
        ("tidegate serve --chat-template te", {"template.jinja"}),
        ("tidegate serve qwen3-0", {"qwen3-0.6b"}),
        ("tidegate serve qwen3-0.6b mod", {"model.gguf", "models"}),
        ("tidegate bench st", {"step"}),
        ("tidegate bench step --bat", {"--batch"}),
        ("tidegate keys ", {"add", "list", "revoke"}),
        ("tidegate keys revoke ke", {"keys.toml"}),
        ("tidegate keys revoke keys.toml ", {"alice"}),
        ("tidegate completion ", {"bash", "zsh", "fish"}),
        ("tidegate chat --port ", {str(RANDOM_PORT)}),
        ("tidegate stop ", {str(RANDOM_PORT)}),
        ("tidegate serve --max-slots ", set()),
        ("tidegate serve --prefix-c", set()),
        ("tidegate ps nothing", set()),
    ],
)
def test_a_word_is_completed(shell: Shell, line: str, expected: set[str], folder: Path) -> None:
    assert found(shell, line, folder) == expected


def test_a_value_after_an_equals_sign_is_completed(shell: Shell, folder: Path) -> None:
    suggested = found(shell, "tidegate serve --dtype=b", folder)
    assert {each.rpartition("=")[2] for each in suggested} == {"bfloat16"}


def test_commands_before_it_in_the_line_are_ignored(shell: Shell, folder: Path) -> None:
    if shell.name == "bash":
        pytest.skip("bash passes only the last command")
    assert found(shell, "cd . && tidegate serve --max-sl", folder) == {"--max-slots"}


def test_bash_completes_what_is_typed(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script("bash"))
    install(tmp_path)
    (tmp_path / "a template.jinja").touch()
    command = ["bash", "--norc", "-i"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"TERM": "xterm", "PS1": "$ ", "HISTFILE": "", "PATH": path}
    with PseudoTerminal(command, environment=environment, has_stderr=True) as terminal:
        terminal.press(f"cd {tmp_path}; source {file}; echo is-$((1))-ready\n".encode())
        assert eventually(lambda: terminal.shows("is-1-ready")), terminal.text
        for typed, completed in (
            ("tidegate serve --max-sl", "tidegate serve --max-slots "),
            ("tidegate serve --dtype=fl", "tidegate serve --dtype=float32 "),
            ("tidegate serve --chat-template a", r"--chat-template a\ template.jinja "),
        ):
            terminal.text = ""
            terminal.press(typed.encode() + b"\t")
            assert eventually(lambda text=completed: terminal.shows(text)), terminal.text  # type: ignore[misc]
            terminal.press(b"\x15")  # Ctrl-U


@pytest.mark.parametrize("words", [["tcsh"], ["bash", "more"]])
def test_another_shell_is_a_usage_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["completion", *words]))
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
