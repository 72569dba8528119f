"""The terminal of `tidegate top`: the alternate screen, its size, and the keyboard."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence

from tools.top.picture import Canvas

OPEN, CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
QUIT_KEYS = frozenset(b"q\x03\x04")
"""q, Ctrl-C, Ctrl-D"""


class TopScreen:
    """The terminal in full-screen mode. `open_screen` creates it.

    wake   descriptor that becomes readable when the size of the terminal changes
    """

    def __init__(self, wake: int, has_colours: bool) -> None:
        self._wake = wake
        self._has_colours = has_colours

    @property
    def canvas(self) -> Canvas:
        """A canvas that has the current size of the terminal."""
        size = os.get_terminal_size(sys.stdout.fileno())
        return Canvas(size.columns, size.lines, self._has_colours)

    def show(self, lines: Sequence[str]) -> None:
        text = f"{REST_OF_LINE}\n".join(lines)
        sys.stdout.write(f"{HOME}{text}{REST_OF_LINE}{REST_OF_SCREEN}")
        sys.stdout.flush()

    def wait(self, seconds: float) -> bool:
        """Wait until `seconds` have passed, the size changes or a key is pressed.

        Return False if the user quits.
        """
        stdin = sys.stdin.fileno()
        ready, _, _ = select.select([stdin, self._wake], [], [], seconds)
        if self._wake in ready:
            os.read(self._wake, 4096)
        if stdin not in ready:
            return True
        keys = os.read(stdin, 64)
        return bool(keys) and not QUIT_KEYS & set(keys)


@contextlib.contextmanager
def open_screen(*, has_colours: bool) -> Iterator[TopScreen]:
    """Show the alternate screen of the terminal inside the `with` block."""
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
