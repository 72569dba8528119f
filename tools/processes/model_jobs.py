"""Runs the processes that download and remove models (`tools.processes.model_job`), one at a time.

It never waits: the selector of the supervisor's loop waits for the output and the end of a process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Callable
from typing import IO

import msgspec

from protocol.process.lifeline import Lifeline
from tools.processes.actions import Action
from tools.processes.child_environment import child_environment
from tools.processes.children import READ_BYTES, module_command
from tools.processes.model_job import JobReport


class RunningJob:
    """A process that downloads or removes a model. Its constructor starts it.

    pidfd   descriptor that becomes readable when the process exits
    """

    def __init__(self, order: bytes) -> None:
        self._lifeline = Lifeline()
        self.process = subprocess.Popen(
            module_command("tools.processes.model_job", order.decode()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(self._lifeline.environment),
            process_group=0,
            pass_fds=self._lifeline.child_ends,
        )
        self._lifeline.on_started()
        self.pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.reports, self.lines = LineReader(self.process.stdout), LineReader(self.process.stderr)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Kill what is left of the process, and wait for its end."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.reports.close()
        self.lines.close()
        os.close(self.pidfd)
        self._lifeline.close()


class LineReader:
    """Reads complete lines from a pipe, without waiting."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._unfinished = b""
        self.fd = pipe.fileno()
        os.set_blocking(self.fd, False)

    def read(self) -> list[bytes] | None:
        """Return the lines that READ_BYTES of the output complete; None at its end."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return []
        return self._split(data) if data else None

    def rest(self) -> list[bytes]:
        """Return the remaining lines of a process that has ended. Its own children may have the
        pipe still open."""
        found: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fd, READ_BYTES):
                found += self._split(data)
        return found

    def _split(self, data: bytes) -> list[bytes]:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return lines

    def close(self) -> None:
        self._pipe.close()


def read_report(line: bytes) -> JobReport | None:
    """Return the report in a line of a job's output; None if the line is no report."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        report: JobReport = msgspec.json.decode(line, type=JobReport)
        return report
    return None


class ModelJobs:
    """Starts and stops the jobs of a server.

    selector    waits for the descriptors. The data of each is a function without arguments
    print_line  logs what a job prints for people
    on_report   is called with each report except the last one
    on_ended    is called at the end of a job, with its last report; None: it printed none
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        print_line: Callable[[str], object],
        *,
        on_report: Callable[[JobReport], list[Action]],
        on_ended: Callable[[JobReport | None], list[Action]],
    ) -> None:
        self._selector, self._print_line = selector, print_line
        self._on_report, self._on_ended = on_report, on_ended
        self._job: RunningJob | None = None
        self._last: JobReport | None = None

    def start(self, order: bytes) -> None:
        """Start a job. None may be running."""
        assert self._job is None
        job = self._job = RunningJob(order)
        self._last = None
        read = selectors.EVENT_READ
        self._selector.register(job.reports.fd, read, lambda: self._on_output(job.reports))
        self._selector.register(job.lines.fd, read, lambda: self._on_output(job.lines))
        self._selector.register(job.pidfd, read, self._on_exit)

    def stop(self) -> None:
        """Terminate the running job. Its end is reported like any other."""
        if self._job is not None:
            self._job.signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill the running job, if there is one. Its partial files stay."""
        if self._job is not None:
            self._job.signal(signal.SIGKILL)
            self._unregister(self._job)
            self._job.close()
            self._job = None

    def _on_output(self, reader: LineReader) -> list[Action]:
        assert self._job is not None
        lines = reader.read()
        if lines is None:
            self._selector.unregister(reader.fd)
            return []
        return self._handle(reader, lines)

    def _handle(self, reader: LineReader, lines: list[bytes]) -> list[Action]:
        assert self._job is not None
        actions: list[Action] = []
        for line in lines:
            if reader is self._job.lines:
                self._print_line(line.decode(errors="replace"))
                continue
            report = read_report(line)
            if report is None:  # of a library that writes to the descriptor itself
                self._print_line(line.decode(errors="replace"))
                continue
            self._last = report
            actions += self._on_report(report)
        return actions

    def _on_exit(self) -> list[Action]:
        job = self._job
        assert job is not None
        actions = [
            *self._handle(job.lines, job.lines.rest()),
            *self._handle(job.reports, job.reports.rest()),
        ]
        self._unregister(job)
        job.close()
        self._job = None
        return [*actions, *self._on_ended(self._last)]

    def _unregister(self, job: RunningJob) -> None:
        for fd in (job.pidfd, job.reports.fd, job.lines.fd):
            with contextlib.suppress(KeyError):  # the output has ended before
                self._selector.unregister(fd)
