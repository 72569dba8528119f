"""Starts the programs under test, collects their output, and kills them at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from protocol.process.process_state import ZOMBIE, read_all_stats, read_command_line, read_stat
from tests.support.waiting import HANG_S, eventually

ROOT = Path(__file__).parents[2]
LAST_LINES_S = 5.0
"""The time for reading the last lines of a program that has ended. Only a failing test needs it."""
AUDITED = Path(__file__).parent / "audited"
"""This folder's `sitecustomize` ends a program that unpickles a class or a function."""


def _audited(environment: dict[str, str]) -> dict[str, str]:
    path = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (str(AUDITED), path)))}


class Program:
    """A running program, which is killed at the end of its `with` block.

    The program and its Python children exit if they unpickle a class or a function
    (audited/sitecustomize.py).

    program     the program; default: this Python
    has_stdin   whether `send_line` may be called; otherwise stdin is empty
    out, err    the lines printed so far on stdout and on stderr
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        has_stdin: bool = False,
        program: str = sys.executable,
    ) -> None:
        environment = environment or {}
        if "serve" in arguments and "XDG_RUNTIME_DIR" not in environment:
            assert "--port" in arguments, "two tests may use the default port at the same time"
        self.process = subprocess.Popen(
            [program, *arguments],
            cwd=cwd,
            stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_audited({**os.environ, **environment}),
            start_new_session=True,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._news = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(stream, kept))
            for stream, kept in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        for reader in self._readers:
            reader.join(10)

    @property
    def output(self) -> str:
        return "\n".join(["-- stdout", *self.out, "-- stderr", *self.err])

    def line_with(self, words: str, *, timeout_s: float = HANG_S, on_stderr: bool = False) -> str:
        """Wait for a line on stdout, or on stderr, that contains `words`, and return it. The two
        streams are read independently, so the order of lines between them is not known."""
        lines = self.err if on_stderr else self.out

        def found() -> list[str]:
            return [line for line in list(lines) if words in line]

        with self._news:
            self._news.wait_for(lambda: found() or self.process.poll() is not None, timeout_s)
        # If the program has ended, the readers may still have to read its last lines.
        assert eventually(found, within_s=LAST_LINES_S), f"no line with {words!r}:\n{self.output}"
        return found()[0]

    def send_line(self, line: str) -> None:
        assert self.process.stdin is not None, "started without has_stdin"
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end_input(self) -> None:
        assert self.process.stdin is not None, "started without has_stdin"
        self.process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, *, timeout_s: float = HANG_S) -> int:
        """Wait for the end of the program and of its output. Return the exit code. A program that
        does not end is killed: it might have what the next tests need."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.__exit__()
            raise AssertionError(f"not ended after {timeout_s:g} s:\n{self.output}") from None
        for reader in self._readers:
            reader.join(10)
        return code

    def _read(self, stream: object, kept: list[str]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            with self._news:
                kept.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()
        stream.close()  # type: ignore[attr-defined]


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    stat = read_stat(pid)
    return stat is not None and stat.state != ZOMBIE


def descendants_of(pid: int) -> list[tuple[int, str]]:
    """Return (pid, command line) of all descendants of a process, parents before children."""
    stats = read_all_stats()

    def below(parent: int) -> list[int]:
        children = [each for each, stat in stats.items() if stat.parent == parent]
        return children + [each for child in children for each in below(child)]

    return [(each, " ".join(read_command_line(each))) for each in below(pid)]


def rss_mib(pid: int) -> int:
    """Return the resident memory of a process in MiB; 0 if it does not exist."""
    return _status_mib(pid, "VmRSS")


def peak_mib(pid: int) -> int:
    """Return the most resident memory that a process has had, in MiB, since `reset_peak`."""
    return _status_mib(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    """Start `peak_mib` of a process anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_mib(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) >> 10 for line in lines if line.startswith(field))
