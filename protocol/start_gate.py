"""The start gate: processes import their libraries while the model is still being checked.

A supervisor starts the processes of a server at the gate, before it knows whether the model can be
served. Each process waits at the gate before it opens a model file, a database or a journal. If the
model is refused, the supervisor kills the processes, which have had no effect then.

The gate is a pipe to which nothing is written. Only the supervisor has the writing end. Closing it
ends the wait of every process, however many read from the pipe.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping

VARIABLE = "TIDEGATE_START_GATE"
"""Environment variable with the file descriptor of the reading end."""


class StartGate:
    """The supervisor's end of a gate, which is closed at first.

    Start a process with `environment` and the descriptor `fd` to make it wait.
    """

    def __init__(self) -> None:
        self.fd, self._held = os.pipe()
        self._is_closed = True

    @property
    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: str(self.fd)}

    def open(self) -> None:
        """Let all waiting processes continue. May be called twice."""
        if self._is_closed:
            self._is_closed = False
            os.close(self._held)
            os.close(self.fd)


def gate_descriptors() -> list[int]:
    """Return the descriptors that a child process must inherit to wait at this process's gate."""
    fd = os.environ.get(VARIABLE)
    return [int(fd)] if fd else []


def wait_at_gate(keep_alive: Callable[[], object] = lambda: None, every_s: float = 5) -> None:
    """Wait until the gate of this process is open. Return at once if it has none.

    keep_alive   called every `every_s` seconds during the wait
    """
    for fd in gate_descriptors():
        while not select.select([fd], [], [], every_s)[0]:
            keep_alive()
