"""The lifeline: makes child processes end with their parent, and report why they end.

Two mechanisms end a child, because each has a gap:

- The parent-death signal (Linux). The kernel sends it when the parent's thread that forked the
  child ends. It is not sent if the parent ended before the child requested it.
- A pipe whose other end only the parent has. The kernel closes that end when the parent ends for
  any reason, and then signals the child. The child needs no thread to watch the pipe.

A second pipe leads back to the parent. The child writes the cause of its end to it, so the parent
does not have to guess the cause from the child's output.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import sys
from collections.abc import Mapping

VARIABLE = "TIDEGATE_LIFELINE"
"""Environment variable with the file descriptors of the child's ends of the two pipes."""
MAX_CAUSE_BYTES = 2000
PR_SET_PDEATHSIG = 1  # man 2 prctl
F_SETSIG = 10  # man 2 fcntl; not in the module


class Lifeline:
    """The parent's ends of the two pipes to one child. Start the child with `environment` and the
    descriptors `child_ends`, then call `on_started`."""

    def __init__(self) -> None:
        held, self._ours = os.pipe()
        self._causes, written = os.pipe()
        os.set_blocking(self._causes, False)
        self.child_ends = (held, written)

    @property
    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: " ".join(map(str, self.child_ends))}

    def on_started(self) -> None:
        """Close the parent's copies of the child's ends, after the child was started."""
        for fd in self.child_ends:
            os.close(fd)

    def cause(self) -> str:
        """Return why the child ends, as it or one of its children last reported; "" if unknown."""
        try:
            sent = os.read(self._causes, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            return ""
        return sent.strip().rpartition("\n")[2]

    def close(self) -> None:
        """Close the parent's ends, after the child has ended. A process that the parent has forked
        may close its copies at any time."""
        os.close(self._ours)
        os.close(self._causes)


class ParentPipe:
    """The child's end of the pipe to its parent. Processes that the child forks may use it, too.

    fd   file descriptor of the pipe; None: there is no parent to report to
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd

    @property
    def is_connected(self) -> bool:
        """Whether a `Lifeline` started this process. False for one that was started by hand."""
        return self._fd is not None

    def send_cause(self, cause: str) -> None:
        """Send the reason why this process ends to the parent: the first line of `cause`, cut at
        MAX_CAUSE_BYTES. It is lost if there is no parent, or if the pipe is full."""
        line = (cause.strip().splitlines() or [""])[0].encode()[:MAX_CAUSE_BYTES]
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the parent is gone, or the pipe is full
                os.write(self._fd, line + b"\n")


def attach_to_parent(number: signal.Signals) -> ParentPipe:
    """Make the kernel send the signal `number` to this process when its parent ends, or send it at
    once if the parent has ended already. Return the pipe to the parent.

    Without VARIABLE, in a process started by hand, only the parent-death signal is set up.
    """
    die_with_parent(number)
    descriptors = os.environ.pop(VARIABLE, "").split()
    if not descriptors or sys.platform != "linux":
        return ParentPipe()
    fd, causes = map(int, descriptors)
    os.set_inheritable(fd, False)
    os.set_inheritable(causes, False)
    os.set_blocking(causes, False)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, F_SETSIG, number)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:  # the parent ended before this setup
        os.kill(os.getpid(), number)
    return ParentPipe(causes)


def attach_if_supervised(number: signal.Signals) -> ParentPipe:
    """Attach this process to its parent, if a `Lifeline` started it. A process that was started by
    hand may outlive its shell."""
    return attach_to_parent(number) if VARIABLE in os.environ else ParentPipe()


def die_with_parent(number: signal.Signals) -> None:
    """Make the kernel send signal `number` when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
