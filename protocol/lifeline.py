"""No process of ours outlives the one that started it, and each can say why it ends.

Two lines hold a child, for each has a gap. The parent-death signal (Linux) comes when the thread
that forked is gone, but not to a child whose parent died before it asked for the signal. The pipe,
whose one end only the parent has, is closed by the kernel however the parent goes, and tells that
too: the kernel signals the child by itself, which needs no thread and interrupts no loop.

A second pipe leads back. A child writes into it why it ends, so that its parent need not guess the
cause from what the child has printed.
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
"""In a child's environment: the numbers of its ends of the two pipes."""
MAX_CAUSE_BYTES = 2000
PR_SET_PDEATHSIG = 1  # man 2 prctl
F_SETSIG = 10  # man 2 fcntl; not in the module


class Lifeline:
    """The parent's ends, for one child: pass it `child_ends` and `environment`, then `handed`."""

    def __init__(self) -> None:
        held, self._ours = os.pipe()
        self._causes, written = os.pipe()
        os.set_blocking(self._causes, False)
        self.child_ends = (held, written)

    @property
    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: " ".join(map(str, self.child_ends))}

    def handed(self) -> None:
        """The child has been started and holds its ends."""
        for fd in self.child_ends:
            os.close(fd)

    def cause(self) -> str:
        """Return why the child ended, as it or a process of its own said last; "" if none did."""
        try:
            said = os.read(self._causes, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            return ""
        return said.strip().rpartition("\n")[2]

    def close(self) -> None:
        """The child is gone."""
        os.close(self._ours)
        os.close(self._causes)


class Parent:
    """A child's way to tell the process that started it why it ends. Forks may use it, too."""

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd

    def send_cause(self, cause: str) -> None:
        """Send the first line of `cause`, if there is a parent that wants it. Never waits."""
        line = (cause.strip().splitlines() or [""])[0].encode()[:MAX_CAUSE_BYTES]
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the parent is gone, or the pipe is full
                os.write(self._fd, line + b"\n")


def hold_on(number: signal.Signals) -> Parent:
    """The child's end: this process gets `number` when its parent is gone, and at once if it is
    already. Without a parent of ours (VARIABLE is not set), only of the parent that it has now."""
    die_with_parent(number)
    told = os.environ.pop(VARIABLE, "").split()
    if not told or sys.platform != "linux":
        return Parent()
    fd, causes = map(int, told)
    os.set_inheritable(fd, False)
    os.set_inheritable(causes, False)
    os.set_blocking(causes, False)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, F_SETSIG, number)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:  # it has ended before the kernel was told
        os.kill(os.getpid(), number)
    return Parent(causes)


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel for `number` when the thread that started us ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
