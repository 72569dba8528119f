"""A program with a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from typing import Self

from tests.support.processes import ROOT


class PseudoTerminal:
    """A program with a terminal of its own, which is killed by `close` or at the end of its `with`
    block. `text` is its output so far.

    has_stderr   its stderr is the terminal, too
    """

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 100,
        lines: int = 30,
        *,
        environment: Mapping[str, str] | None = None,
        has_stderr: bool = False,
    ) -> None:
        self.text = ""
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self._theirs = theirs
        self.resize(columns, lines)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if has_stderr else None,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def resize(self, columns: int, lines: int) -> None:
        ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def shows(self, words: str) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.text += os.read(self._ours, 1 << 20).decode(errors="replace")
        return words in self.text

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)
