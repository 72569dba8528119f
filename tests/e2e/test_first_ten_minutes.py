"""docs/start/first-ten-minutes.md, as a newcomer pastes it: all its commands in one shell, in
order.

What the page shows is compared with what the commands print, apart from numbers, times and ids. An
answer of the model may be another one on another machine, so it is only required.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.docs_blocks import FIRST_TEN_MINUTES, blocks_of
from tests.support.ports import free_port
from tests.support.processes import ROOT, descendants_of, is_alive
from tests.support.prompts import FRUITS
from tests.support.shells import install
from tests.support.waiting import eventually
from tools.models.fetch import home
from tools.processes import run_lock
from tools.processes.run_lock import LockFacts

pytestmark = pytest.mark.long

MARK = "::end of command::"
OMITTED = "..."
MODEL_ANSWERS = "<!-- answers differ between machines -->"
BLOCK_S = 240.0


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command of the page, and the lines that the page shows below it."""

    text: str
    shown: list[str]
    #: Whether the lines are an answer of the model.
    is_answer: bool


def shown_commands() -> list[ShownCommand]:
    """Return the commands of the page in order."""
    lines = FIRST_TEN_MINUTES.read_text(encoding="utf-8").splitlines()
    found = []
    for block in blocks_of(FIRST_TEN_MINUTES):
        if block.language != "console":
            continue
        note = lines[block.line - 3]  # above the block's fence
        command: list[str] = []
        shown: list[str] = []
        parts = [(command, shown)]
        is_open = False
        for line in block.text.splitlines():
            if line.startswith("$ "):
                command, shown = [line[2:]], []
                parts.append((command, shown))
                is_open = _is_open(command)
            elif is_open:
                command.append(re.sub(r"^> ?", "", line))
                is_open = _is_open(command)
            else:
                shown.append(line)
        found += [
            ShownCommand("\n".join(command), shown, note == MODEL_ANSWERS)
            for command, shown in parts[1:]
        ]
    return found


def _is_open(command: list[str]) -> bool:
    """Return whether a shell would read another line of the command."""
    ran = subprocess.run(
        ["bash", "-n"], input="\n".join(command) + "\n", capture_output=True, text=True
    )
    return bool(ran.stderr) or command[-1].endswith("\\")


def skeleton(line: str) -> str:
    """Return a line without what differs between two runs."""
    line = re.sub(r"[░▏▎▍▌▋▊▉█]+", "#", line)
    line = re.sub(r"\d+ min (?=\d+ s\b)", "", line)  # a slow machine
    line = re.sub(r"\d[\d.,]*", "0", line)
    return " ".join(line.split())


class PastingShell:
    """A shell that runs commands one after the other, in a home of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.base = folder / "run" / f"tidegate-{os.getuid()}"
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        install(bin_folder)
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        environment = {
            **os.environ,
            "HOME": str(folder),
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TIDEGATE_HOME": str(home()),  # where the model is
            "XDG_RUNTIME_DIR": str(runtime),
        }
        environment.pop("TIDEGATE_API_KEY", None)
        self.process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str) -> tuple[int, list[str]]:
        """Run a command, and return its exit code and the lines that it printed."""
        text = re.sub(r"\b8000\b", str(self.port), command)
        text = re.sub(r"\btidegate serve\b", f"tidegate serve --port {self.port}", text)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f'{{\n{text}\n}} < /dev/null\necho "{MARK} $?"\n')
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if MARK in line:
                before, _, code = line.partition(MARK)
                if before:
                    lines.append(before)
                return int(code), lines
            lines.append(line.rstrip("\n"))
        raise AssertionError("the shell has ended:\n" + "\n".join(lines))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[PastingShell]:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    session = PastingShell(tmp_path, free_port())
    lock = run_lock.hold(session.base / "8000")  # another server of the same user
    run_lock.describe(lock, LockFacts())
    yield session
    session.run(f"tidegate stop {session.port}")
    session.process.kill()
    session.process.communicate()
    os.close(lock)


STRAY = re.compile(r"^stray .*\(pid (\d+)\)")
"""A line of `tidegate ps` about a process that belongs to no server."""


def run_alone(
    session: PastingShell, command: str, family: Sequence[tuple[int, str]]
) -> tuple[int, list[str]]:
    """Run a command. Tests beside this one kill servers, whose last processes are reported as
    strays until they have ended. If there are any that are not of our `family`, run it again."""
    ours = {pid for pid, _ in family}
    ran: tuple[int, list[str]] = (0, [])

    def is_alone() -> bool:
        nonlocal ran
        ran = session.run(command)
        return {int(found[1]) for found in map(STRAY.match, ran[1]) if found} <= ours

    eventually(is_alone)
    return ran


def descendants_of_server(session: PastingShell) -> list[tuple[int, str]]:
    """Return the processes of the session's server, which is no child of its shell."""
    pid = run_lock.holder(session.base / str(session.port))
    return [] if pid is None else [(pid, "tidegate"), *descendants_of(pid)]


@pytest.mark.timeout(600)
def test_the_first_ten_minutes_go_as_the_page_says(tmp_path: Path, session: PastingShell) -> None:
    commands = shown_commands()
    assert len(commands) > 15
    family: list[tuple[int, str]] = []
    for each in commands:
        code, printed = run_alone(session, each.text, family)
        family += descendants_of_server(session)
        result = f"$ {each.text}\n" + "\n".join(printed)
        assert code == 0, result
        if each.is_answer:
            assert any(line.strip() for line in printed) or not each.shown, result
            continue
        expected = [line for line in each.shown if line.strip() not in ("", OMITTED)]
        found = {skeleton(line) for line in printed}
        missing = [line for line in expected if skeleton(line) not in found]
        assert not missing, f"the page shows lines that are not printed: {missing}\n{result}"
    assert family
    assert eventually(lambda: not any(is_alive(pid) for pid, _ in family), within_s=30)
    assert [each.name for each in run_lock.run_directories(session.base)] == ["8000"]


def test_the_page_shows_each_step_of_a_newcomer() -> None:
    texts = [each.text for each in shown_commands()]
    for step in (
        *(
            "tidegate serve --detach\n",
            "http://127.0.0.1:8000/\n",
            "curl -s http",
            "python hello.py",
        ),
        *("tidegate keys add", "--api-keys keys.toml", "tidegate bench", "tidegate top"),
        *("tidegate logs", "tidegate run", "tidegate chat", "tidegate stop"),
    ):
        assert any(step in f"{text}\n" for text in texts), step


def test_the_page_shows_one_answer_to_a_question_at_temperature_0() -> None:
    asked = [
        "\n".join(each.shown)
        for each in shown_commands()
        if FRUITS in each.text and re.search(r"""temperature"?:? 0\b""", each.text)
    ]
    assert len(asked) > 1
    assert len(set(asked)) == 1, "nothing is drawn then"
