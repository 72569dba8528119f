"""Child processes of the supervisor. A child ends when the supervisor ends.

Each child leads a process group of its own, so Ctrl-C at the terminal signals only the supervisor,
which then stops the children in order. The supervisor reads a child's output from a pipe and prints
it unchanged, or as JSON lines. It keeps the last lines, to find an error in them if the child fails
without reporting a cause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import Lifeline
from protocol.process.log_lines import LineFormatter, LogStyle, without_colors, without_style
from protocol.process.process_state import explain_kill, is_stopped, num_oom_kills
from tools.failure import Failure
from tools.processes.actions import ProcessExit, StoppedProcess
from tools.processes.child_environment import child_environment
from tools.processes.server_log import ServerLog

KEPT_LINES = 40
READ_BYTES = 1 << 16
DISCARD_S = 5.0
"""Seconds that the processes of a killed group have to end."""
LOOKS_LIKE_AN_ERROR = re.compile(r"\w*(Error|Exception)\b.*:|\b(ERROR|CRITICAL|FATAL|error:)")


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: its command line, its environment, and the meaning of its exit codes."""

    #: The role of the process, which logs and messages show.
    name: str
    #: The program and its arguments.
    arguments: Sequence[str]
    #: The group of an engine: engines of one group replace each other. "": a group of its own.
    group: str = ""
    #: Address of an engine, as the gateways report it; "" for other processes, or without gateways.
    address: str = ""
    #: Variables added to the supervisor's environment (`child_environment`).
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Working directory; None: the supervisor's.
    directory: Path | None = None
    #: Descriptors that the process inherits.
    keeps_open: Sequence[int] = ()
    #: The server's exit code if the server ends because this process ended.
    exit_code: int = ExitCode.FAILED
    #: Exit codes of this process with a more specific meaning -> the server's exit code.
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    #: Whether the process restarts its own child processes.
    restarts_children: bool = False
    #: How long its child processes may still send errors to their clients after its exit.
    survivors_s: float = 0.0
    #: Format of its log lines. If it is json, other output of the process is converted to JSON.
    log_format: LogStyle = "text"


class Child:
    """A child process. Its constructor starts it.

    log           keeps a copy of what the process prints; None: nothing does
    pidfd         descriptor that becomes readable when the process exits
    output        descriptor that becomes readable when the process prints
    has_printed   whether it has printed anything since the reader set this to False
    """

    def __init__(self, command: Command, log: ServerLog | None = None) -> None:
        self.name = command.name
        self._log = log
        self.survivors_s = command.survivors_s
        self._command = command
        self._lifeline = Lifeline()
        self._num_oom_kills = num_oom_kills()
        self._process = subprocess.Popen(
            command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment(command.environment, self._lifeline.environment),
            cwd=command.directory,
            process_group=0,
            pass_fds=[*command.keeps_open, *self._lifeline.child_ends],
        )
        self._lifeline.on_started()
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.output = self._process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.has_printed = False
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._unfinished = b""

    def relay(self) -> bool:
        """Print at most READ_BYTES of the child's output, without waiting. Return False at the end
        of the output, and True otherwise, even if there is nothing to read now."""
        return self._read() != b""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child; SIGKILL to its whole process group."""
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> ProcessExit:
        """Kill the rest of the child's process group, print the last output, and return how the
        child ended.

        Call this once, after `pidfd` became readable. The group is killed before the wait for the
        child, because the kernel does not reuse the child's process id before that wait.
        """
        self.send(signal.SIGKILL)
        code = self._process.wait()
        while self._read():
            pass
        self._pass_on(b"", [self._unfinished])
        reason = self._reason(code)
        self._close()
        server_code = self._command.exit_codes.get(code, self._command.exit_code)
        return ProcessExit(self.name, code, reason, server_code)

    def discard(self) -> None:
        """Kill the child's process group and wait until all its processes have ended. Print none of
        their output.

        The end of the output shows that the child's own children have ended. A process that has
        left the group could keep it open, so the wait is limited to DISCARD_S.
        """
        self.send(signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + DISCARD_S
        while select.select([self.output], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not os.read(self.output, READ_BYTES):
                break
        self._close()

    def _close(self) -> None:
        os.close(self.pidfd)
        self._lifeline.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _reason(self, code: int) -> str:
        """Return why the child ended: the cause that it reported, or, after a failure, an error
        in its last lines. If a signal killed the child, explain the signal instead, because the
        output says nothing about it."""
        if code < 0:
            return explain_kill(signal.Signals(-code), self._num_oom_kills)
        if code == ExitCode.OK:
            return self._lifeline.cause()
        return self._lifeline.cause() or last_error_line(map(without_style, self._lines))

    def kill(self, pid: int) -> None:
        """Kill the process `pid`, the child or a child of it, if it is stopped (SIGSTOP)."""
        if any(each.pid == pid for each in self.stopped()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stopped(self) -> list[StoppedProcess]:
        """Return those of the child and its child processes that are stopped now (SIGSTOP)."""
        pids = [self.pid, *_children_of(self.pid)]
        return [StoppedProcess(self.name, pid, pid == self.pid) for pid in pids if is_stopped(pid)]

    def _read(self) -> bytes | None:
        """Read some output, print it and return it. Return None if there is none now, and b"" at
        the end of the output."""
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
        """Print some output: `data` unchanged, or its complete lines `whole` as JSON. The lines are
        also kept for `_reason`."""
        self._lines.extend(line.decode(errors="replace") for line in whole)
        if self._command.log_format == "json":
            whole = [self._as_json(line) for line in whole if line.strip()]
            data = b"".join(line + b"\n" for line in whole)
        if self._log is not None:
            self._log.write(without_colors(line) for line in whole if line.strip())
        with contextlib.suppress(OSError):  # a closed stderr must not end the child
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()

    def _as_json(self, line: bytes) -> bytes:
        """Return a JSON log line unchanged, and any other output as a JSON log line."""
        if line.startswith(b"{"):
            return line
        message = line.decode(errors="replace")
        facts = {"name": self.name, "levelname": "INFO", "msg": message, "process": self.pid}
        return LineFormatter(self.name, "json").format(logging.makeLogRecord(facts)).encode()


def _children_of(pid: int) -> list[int]:
    """Return the child processes of `pid`; none if the kernel lacks CONFIG_PROC_CHILDREN."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class ModuleResult(NamedTuple):
    """The result of a module that ran in its own process."""

    code: int
    output: bytes
    #: The line of its stderr that looks most like an error; "" if it wrote nothing there.
    error: str


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of Tidegate as a program, with this interpreter.

    `-P` keeps the working directory out of sys.path, where a folder of the user might have the name
    of one of Tidegate's packages.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def run_module(
    purpose: str, command: Sequence[str], *, timeout_s: float, **environment: str
) -> ModuleResult:
    """Run a `module_command` and wait until it ends. Raises Failure after `timeout_s` seconds.

    purpose       what the command does, for the error message: "reading the model's files"
    environment   variables added to this process's environment
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            env=child_environment(environment),
        )
    except subprocess.TimeoutExpired:
        raise Failure(f"{purpose} took more than {timeout_s:g} s") from None
    error = last_error_line(done.stderr.decode(errors="replace").splitlines())
    return ModuleResult(done.returncode, done.stdout, error)


def messages_of(
    command: Sequence[str],
    kind: Any,
    name: str,
    *,
    exit_codes: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """Run a `module_command` and yield the messages that it prints, a JSON text in each line. If
    the caller stops before the last one, terminate the process. Raises Failure, with the error of
    the process, if it fails.

    kind         the type of the messages
    name         name of the process, for the error message: "the benchmark"
    exit_codes   exit codes of the process that are also those of the Failure
    environment  variables added to this process's environment
    """
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(environment or {}),
        ) as process,
        contextlib.ExitStack() as interrupted,
    ):
        interrupted.callback(process.terminate)
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            yield msgspec.json.decode(line, type=kind)
        errors = process.stderr.read().decode(errors="replace").splitlines()
        interrupted.pop_all()
    if code := process.returncode:
        reason = last_error_line(errors) or f"{name} exited with code {code}"
        raise Failure(reason, exit_code=code if code in exit_codes else ExitCode.FAILED)


def last_error_line(lines: Iterable[str]) -> str:
    """Return the last line that matches LOOKS_LIKE_AN_ERROR, or else the last one that is not
    blank; "" if there is none."""
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if LOOKS_LIKE_AN_ERROR.search(line)]
    return (errors or lines or [""])[-1]
