"""The title of a process, as the system shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from protocol.config.engine import EngineConfig
from protocol.config.worker import WorkerConfig
from protocol.process.process_state import PROC, program_name, read_command_line
from tests.support.processes import ROOT
from tools.processes.serve_commands import engine_command

TITLED = """
import sys
from protocol.process.process_title import set_title
for title in sys.argv[1].split(","):
    set_title(title)
print(flush=True)
sys.stdin.read()
"""


class TitledProcess:
    """The arguments and the short name of a process that has set its title.

    titles   the titles that it sets, one after the other
    """

    def __init__(self, titles: str, *arguments: str) -> None:
        command = [sys.executable, "-c", TITLED, titles, *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
            process.stdout.readline()
            self.arguments = read_command_line(process.pid)
            self.program = program_name(process.pid)
            self.name = (PROC / str(process.pid) / "comm").read_text().strip()
            process.stdin.close()


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def test_a_title_replaces_the_interpreter_and_keeps_the_arguments() -> None:
    titled = TitledProcess("engine", "--config", "{}")
    assert titled.arguments == ["tidegate: engine", "-c", TITLED, "engine", "--config", "{}"]
    assert titled.program == "tidegate: engine"
    assert titled.name == "tidegate: engin"


def test_a_later_title_replaces_an_earlier_one() -> None:
    titled = TitledProcess("gateway,gateway 12", "last")
    assert titled.arguments[0] == "tidegate: gateway 12"
    assert titled.arguments[-1] == "last"


def test_a_title_that_is_longer_than_the_interpreter_cuts_the_last_argument() -> None:
    role = "x" * len(sys.executable)
    titled = TitledProcess(role, "y" * 100)
    assert titled.arguments[0] == f"tidegate: {role}"
    assert titled.arguments[-1] == "y" * (100 - len("tidegate: "))


def test_an_engine_shows_its_name_and_its_role() -> None:
    rows: list[tuple[str, Literal["both", "prefill", "decode"], str]] = [
        ("engine", "both", "engine"),
        ("engine 2", "both", "engine 2"),
        ("engine 2", "decode", "engine 2 (decode)"),
        ("engine qwen3", "prefill", "engine qwen3 (prefill)"),
    ]
    for name, role, title in rows:
        config = EngineConfig(worker=WorkerConfig(model="m"), role=role)
        assert [*engine_command(name, config, lock=3).arguments][-2:] == ["--title", title]
