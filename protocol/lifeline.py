"""The lifeline: child processes end with their parent, and report why they end.

A child is held by two mechanisms, since each has a gap. The parent-death signal (Linux) is sent
when the thread that forked ends, but not if the parent died before the child requested the signal.
The pipe, whose other end only the parent has, is closed by the kernel however the parent ends; then
the kernel signals the child, which needs no thread and interrupts no loop.

A second pipe leads back. The child writes the cause of its end to it, so the parent need not guess
it from the child's output.
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
"""Environment variable with the child's descriptors of the two pipes."""
MAX_CAUSE_BYTES = 2000
PR_SET_PDEATHSIG = 1  # man 2 prctl
F_SETSIG = 10  # man 2 fcntl; not in the module


class Lifeline:
    """The parent's ends for one child. Call `on_started` after the child was started."""

    def __init__(self) -> None:
        held, self._ours = os.pipe()
        self._causes, written = os.pipe()
        os.set_blocking(self._causes, False)
        self.child_ends = (held, written)

    @property
    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: " ".join(map(str, self.child_ends))}

    def on_started(self) -> None:
        """Close the child's ends here, after the child was started with them."""
        for fd in self.child_ends:
            os.close(fd)

    def cause(self) -> str:
        """Return the last cause that the child or one of its children has sent; "" if none."""
        try:
            sent = os.read(self._causes, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            return ""
        return sent.strip().rpartition("\n")[2]

    def close(self) -> None:
        """Close the parent's ends, after the child has ended."""
        os.close(self._ours)
        os.close(self._causes)


class ParentPipe:
    """Sends a child's cause of death to its parent. Forked processes may use it, too."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd

    def send_cause(self, cause: str) -> None:
        """Send the first line of `cause`, if there is a parent to receive it. Never waits."""
        line = (cause.strip().splitlines() or [""])[0].encode()[:MAX_CAUSE_BYTES]
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the parent is gone, or the pipe is full
                os.write(self._fd, line + b"\n")


def attach_to_parent(number: signal.Signals) -> ParentPipe:
    """Arrange that this process gets `number` when its parent ends, or at once if it has ended
    already.

    Without VARIABLE (started by hand) only the parent-death signal is set up.
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


def die_with_parent(number: signal.Signals) -> None:
    """Make the kernel send `number` when the thread that started this process ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
