"""A worker process that the engine has started: its start, its end, and the causes that end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec

from protocol.config.worker import WorkerConfig
from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import Lifeline
from protocol.process.malloc import huge_page_environment
from protocol.process.process_state import explain_kill, is_stopped, num_oom_kills
from protocol.process.start_gate import gate_descriptors


class WorkerLost(Exception):
    """A worker ended, failed or does not respond. The message gives the cause, and the rank of the
    worker if it belongs to a group."""

    def __init__(self, message: str, exit_code: int = ExitCode.WORKER_LOST) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StoppedBySignal(Exception):
    """Raised after SIGQUIT, which stops the engine process at once, and its workers with it."""


def name_of(rank: int, size: int) -> str:
    """Return the name of a worker in messages."""
    return "the worker" if size == 1 else f"worker rank {rank}"


class WorkerProcess:
    """One worker process. The constructor starts it.

    death   a pidfd, which becomes readable when the process ends
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.rank = config.rank
        self._name = name_of(config.rank, config.world_size)
        self._lifeline = Lifeline()
        self._num_oom_kills = num_oom_kills()
        settings = msgspec.json.encode(config).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker", "--config", settings],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **huge_page_environment(), **self._lifeline.environment},
            pass_fds=[*self._lifeline.child_ends, *gate_descriptors()],
        )
        self._lifeline.on_started()
        self.death = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether the process has been stopped (SIGSTOP)."""
        return is_stopped(self.pid)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the process."""
        return (self._process.poll() or 0) < 0

    def exit_error(self) -> WorkerLost:
        """Wait for the process to end, and return an error that describes how it ended."""
        code = self._process.wait()
        if code < 0:
            number = signal.Signals(-code)
            why = explain_kill(number, self._num_oom_kills)
            return WorkerLost(f"{self._name} was killed by {number.name}" + (why and f": {why}"))
        is_specific = code in frozenset(ExitCode) and code not in (ExitCode.OK, ExitCode.FAILED)
        exit_code = ExitCode(code) if is_specific else ExitCode.WORKER_LOST
        why = self._lifeline.cause()
        return WorkerLost(f"{self._name} exited with code {code}" + (why and f": {why}"), exit_code)

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the process to end. Return False if it still runs after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the descriptors, after the process has ended."""
        os.close(self.death)
        self._lifeline.close()
