"""No process of ours outlives the one that started it.

Two lines hold a child, for each has a gap. The parent-death signal (Linux) comes when the thread
that forked is gone, but not to a child whose parent died before it asked for the signal. The pipe,
whose one end only the parent has, is closed by the kernel however the parent goes, and tells that
too: the kernel signals the child by itself, which needs no thread and interrupts no loop.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import sys
from collections.abc import Mapping

VARIABLE = "TIDEGATE_LIFELINE"
"""In a child's environment: the number of its end of the pipe."""
PR_SET_PDEATHSIG = 1  # man 2 prctl
F_SETSIG = 10  # man 2 fcntl; not in the module


class Lifeline:
    """The parent's end, for one child: pass `child_end` and `environment` to it, then `handed`."""

    def __init__(self) -> None:
        self.child_end, self._ours = os.pipe()

    @property
    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: str(self.child_end)}

    def handed(self) -> None:
        """The child has been started and holds its end."""
        os.close(self.child_end)

    def close(self) -> None:
        """The child is gone."""
        os.close(self._ours)


def hold_on(number: signal.Signals) -> None:
    """The child's end: this process gets `number` when its parent is gone, and at once if it is
    already. Without a parent of ours (VARIABLE is not set), only of the parent that it has now."""
    die_with_parent(number)
    told = os.environ.pop(VARIABLE, "")
    if not told or sys.platform != "linux":
        return
    fd = int(told)
    os.set_inheritable(fd, False)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, F_SETSIG, number)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:  # it has ended before the kernel was told
        os.kill(os.getpid(), number)


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel for `number` when the thread that started us ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
