"""Runs commands of `tidegate` in this process, which saves the start of another one."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tools.__main__ import main


class CommandRun(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


def run_command(capfd: pytest.CaptureFixture[str], *words: str) -> CommandRun:
    """Run a command, and return its result."""
    capfd.readouterr()
    try:
        code = main(words)
    except SystemExit as end:  # the parser has printed an error
        code = int(end.code or 0)
    return CommandRun(code, *capfd.readouterr())
