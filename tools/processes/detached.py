"""`tidegate serve --detach`: a server that goes on in the background when it is ready.

The command forks. The child gets a session of its own and starts the server; it prints to the
user's terminal, as a server in the foreground does, until it is ready. The parent waits until then.
If the child ends before, its failure has been printed, and its exit code is that of the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from protocol.process.exit_codes import KILLED, ExitCode

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY = b"r"


class Background:
    """How the server, in the child process, leaves the terminal when it is ready.

    fd   the pipe to the command that waits
    """

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def enter(self) -> None:
        """Let the command end, and print nothing to its terminal from now on."""
        if self._fd is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        _open_as(os.devnull, os.O_WRONLY, (1, 2))
        with contextlib.suppress(BrokenPipeError):  # the command was killed
            os.write(self._fd, READY)
        os.close(self._fd)
        self._fd = None


def run_detached(serve: Callable[[Background], int]) -> int:
    """Call `serve` in a child process, and return its exit code there. In this process return 0
    when the child has called `Background.enter`, or the child's exit code if it has ended before.
    No other thread may run."""
    waiting, ready = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(waiting)
        os.setsid()  # so neither Ctrl-C nor the end of the terminal reaches the server
        _open_as(os.devnull, os.O_RDONLY, (0,))
        return serve(Background(ready))
    os.close(ready)
    with _forwarding(pid):
        is_ready = os.read(waiting, 1) == READY
        os.close(waiting)
        return ExitCode.OK if is_ready else _exit_code(pid)


@contextlib.contextmanager
def _forwarding(pid: int) -> Iterator[None]:
    """Send the stop signals that this process receives in this block to the process `pid`."""

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(pid: int) -> int:
    """Wait for the end of a child process, and return its exit code as shells do."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else KILLED - code


def _open_as(path: str, flags: int, descriptors: tuple[int, ...]) -> None:
    opened = os.open(path, flags)
    for fd in descriptors:
        os.dup2(opened, fd)
    os.close(opened)
