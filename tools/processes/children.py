"""A child process: started so that it need not outlive us, stopped with all that it has started.

Each child leads its own process group, so that Ctrl-C at the terminal reaches only us, and we
decide in which order the children hear of it. Its output comes through a pipe, is passed on as it
is, or as JSON lines, and its last lines are kept for a child that fails without saying why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.exit_codes import ExitCode
from protocol.lifeline import Lifeline
from protocol.log_lines import LineFormatter, LogStyle, without_style
from protocol.process_state import is_stopped, num_oom_kills, why_killed
from tools.processes.supervisor import ProcessExit, Stopped

KEPT_LINES = 40
READ_BYTES = 1 << 16
LOOKS_LIKE_AN_ERROR = re.compile(r"\w*(Error|Exception)\b.*:|\b(ERROR|CRITICAL|FATAL|error:)")


@dataclass(frozen=True, slots=True)
class Command:
    """What to start.

    environment   added to ours
    directory     to start in; None: where we are
    keeps_open    descriptors that it inherits
    stands_for    the server's exit code where this one's end is the server's
    tells         its own codes that say more than that it ended -> the server's
    revives       it starts what it has started again when that dies
    log_format    of its log lines; if json, all else that it prints is made JSON
    survivors_s   how long the processes that it has started may live on after its death, to send
                  their clients an error
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None
    keeps_open: Sequence[int] = ()
    stands_for: int = ExitCode.FAILED
    tells: Mapping[int, int] = field(default_factory=dict)
    revives: bool = False
    survivors_s: float = 0.0
    log_format: LogStyle = "text"


class Child:
    """One started process. `pidfd` is readable when it has exited, `output` when it has printed."""

    def __init__(self, command: Command) -> None:
        self.name = command.name
        self.survivors_s = command.survivors_s
        self._command = command
        self._lifeline = Lifeline()
        self._num_oom_kills = num_oom_kills()
        self._process = subprocess.Popen(
            command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment, **self._lifeline.environment},
            cwd=command.directory,
            process_group=0,
            pass_fds=[*command.keeps_open, *self._lifeline.child_ends],
        )
        self._lifeline.handed()
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.has_printed = False  # since whoever wants to know has reset it
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._unfinished = b""

    def relay(self) -> bool:
        """Pass on what the child has printed by now. False when it can print no more."""
        return self._read() != b""

    def send(self, number: signal.Signals) -> None:
        """To the child, which passes it on as it sees fit; SIGKILL to its whole group."""
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(self.pidfd, number)

    def bury(self) -> ProcessExit:
        """Call when `pidfd` is readable: end what the child left behind, take its last words.

        The group is killed before the child is waited for: until then its number is not given away.
        """
        self.send(signal.SIGKILL)
        code = self._process.wait()
        while self._read():
            pass
        self._pass_on(b"", [self._unfinished])
        why = self._why(code)
        os.close(self.pidfd)
        self._lifeline.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        stands_for = self._command.tells.get(code, self._command.stands_for)
        return ProcessExit(self.name, code, why, stands_for)

    def _why(self, code: int) -> str:
        """Return why it ended: the cause that it reported, or else its last lines, if it failed by
        itself. The output of a process that a signal killed does not explain its death."""
        if code < 0:
            return why_killed(signal.Signals(-code), self._num_oom_kills)
        if code == ExitCode.OK:
            return self._lifeline.cause()
        return self._lifeline.cause() or last_words(map(without_style, self._lines))

    def kill(self, pid: int) -> None:
        """Kill the child alone, or a process that it has started, if that is stopped (SIGSTOP)."""
        if any(each.pid == pid for each in self.stopped()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stopped(self) -> list[Stopped]:
        """Those of the child and of what it has started that are stopped now (SIGSTOP)."""
        pids = [self.pid, *_children_of(self.pid)]
        return [Stopped(self.name, pid, pid == self.pid) for pid in pids if is_stopped(pid)]

    def _read(self) -> bytes | None:
        """One piece of output, passed on and kept; None if there is none now, b"" at the end."""
        try:
            data = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return None
        self.has_printed = self.has_printed or data != b""
        *whole, unfinished = (self._unfinished + data).split(b"\n")
        self._unfinished = unfinished[-READ_BYTES:]
        self._pass_on(data, whole)
        return data

    def _pass_on(self, data: bytes, whole: Sequence[bytes]) -> None:
        """Print `data`, or the lines that are `whole` now as JSON, and keep these lines."""
        self._lines.extend(line.decode(errors="replace") for line in whole)
        if self._command.log_format == "json":
            data = b"".join(self._as_json(line) + b"\n" for line in whole if line.strip())
        with contextlib.suppress(OSError):  # our own stderr may be gone; the child need not go
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()

    def _as_json(self, line: bytes) -> bytes:
        """Return a line of the child's log as it is, and what a library printed as such a line."""
        if line.startswith(b"{"):
            return line
        message = line.decode(errors="replace")
        facts = {"name": self.name, "levelname": "INFO", "msg": message, "process": self.pid}
        return LineFormatter(self.name, "json").format(logging.makeLogRecord(facts)).encode()


def _children_of(pid: int) -> list[int]:
    """Those whom it started itself, where the kernel tells (CONFIG_PROC_CHILDREN)."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def last_words(lines: Iterable[str]) -> str:
    """Return the last line that looks like an error, else the last with any text."""
    spoken = [line.strip() for line in lines if line.strip()]
    errors = [line for line in spoken if LOOKS_LIKE_AN_ERROR.search(line)]
    return (errors or spoken or [""])[-1]
