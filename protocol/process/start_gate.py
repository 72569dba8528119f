"""The start gate: processes import their libraries while the model is still being checked.

A supervisor starts the processes of a server before it is known whether the model can be served.
Each process waits at the gate before it opens a model file, a database or a journal. If the model
is refused, the supervisor kills the processes. By then they have bound their sockets, and the
gateway may have made an empty directory for its metrics, but they have used no file of the user.

The gate is a pipe, and only the supervisor has the writing end. To open the gate, the supervisor
writes one byte, which stays in the pipe: all processes see it, and so do their later children. If
the pipe ends without a byte, the supervisor was killed, and the waiting processes exit.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios
from collections.abc import Callable, Mapping

from protocol.process.exit_codes import ExitCode

VARIABLE = "TIDEGATE_START_GATE"
"""Environment variable with the file descriptor of the reading end."""


class StartGate:
    """The supervisor's end of a gate, which is closed at first.

    Start a process with `environment` and the descriptor `fd` to make it wait.
    """

    def __init__(self) -> None:
        self.fd, self._held = os.pipe()
        self._has_pipe = True

    @property
    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: str(self.fd)}

    def open(self) -> None:
        """Let all waiting processes continue. May be called twice."""
        if self._has_pipe:
            os.write(self._held, b"o")
            self.close()

    def close(self) -> None:
        """Close the supervisor's descriptors. If the gate is not open, waiting processes exit."""
        if self._has_pipe:
            self._has_pipe = False
            os.close(self._held)
            os.close(self.fd)


def gate_descriptors() -> list[int]:
    """Return the descriptors that a child process must inherit to wait at this process's gate."""
    fd = os.environ.get(VARIABLE)
    return [int(fd)] if fd else []


def wait_at_gate(keep_alive: Callable[[], object] = lambda: None, every_s: float = 5) -> None:
    """Wait until the gate of this process is open. Return at once if it has none.

    keep_alive   called every `every_s` seconds during the wait

    Raises SystemExit if the supervisor was killed before it opened the gate.
    """
    for fd in gate_descriptors():
        while not select.select([fd], [], [], every_s)[0]:
            keep_alive()
        if not _num_unread_bytes(fd):
            sys.exit(ExitCode.FAILED)


def _num_unread_bytes(fd: int) -> int:
    """Return the number of bytes in a pipe.

    This distinguishes a byte from the end of the pipe. gevent's `poll` does not.
    """
    count = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)
