"""The terminal: a screen of our own while we are there, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence

from tools.top.picture import Paper

OPEN, CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
LEAVE = frozenset(b"q\x03\x04")
"""q, Ctrl-C, Ctrl-D"""


class TopScreen:
    """To be made by `opened`."""

    def __init__(self, wake: int, has_colours: bool) -> None:
        self._wake = wake
        self._has_colours = has_colours

    @property
    def paper(self) -> Paper:
        """As large as the terminal is now."""
        size = os.get_terminal_size(sys.stdout.fileno())
        return Paper(size.columns, size.lines, self._has_colours)

    def show(self, lines: Sequence[str]) -> None:
        text = f"{REST_OF_LINE}\n".join(lines)
        sys.stdout.write(f"{HOME}{text}{REST_OF_LINE}{REST_OF_SCREEN}")
        sys.stdout.flush()

    def wait(self, seconds: float) -> bool:
        """Until time has passed or the size has changed; False: somebody wants to leave."""
        stdin = sys.stdin.fileno()
        ready, _, _ = select.select([stdin, self._wake], [], [], seconds)
        if self._wake in ready:
            os.read(self._wake, 4096)
        if stdin not in ready:
            return True
        keys = os.read(stdin, 64)
        return bool(keys) and not LEAVE & set(keys)


@contextlib.contextmanager
def opened(*, has_colours: bool) -> Iterator[TopScreen]:
    """stdin and stdout are a terminal."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    ours, kernels = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handler = signal.signal(signal.SIGWINCH, lambda *_: None)
    old = signal.set_wakeup_fd(kernels, warn_on_full_buffer=False)
    try:
        tty.setcbreak(stdin)
        sys.stdout.write(OPEN)
        yield TopScreen(ours, has_colours)
    finally:
        sys.stdout.write(CLOSE)
        sys.stdout.flush()
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGWINCH, handler)
        os.close(ours)
        os.close(kernels)
