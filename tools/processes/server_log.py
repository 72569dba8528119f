"""`ServerLog`: the log of a server in its run directory, for `tidegate logs`.

The supervisor alone writes it: its own lines, and those that it relays from the other processes. So
no two processes write to one file, and a rotation loses no line. The size is bounded: a file that
is full becomes `server.log.1`, in place of the one before. The files end with the run directory,
except those of a server in the background, whose end no terminal shows: they are moved.

A log that cannot be written does not end the server. Its lines are lost, and the next one is tried
again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.terminal import Terminal

LOG_FILE = "server.log"
OLD_LOG_FILE = "server.log.1"
MAX_LINE_BYTES = 1 << 16
"""Longer lines are cut in the file."""


class ServerLog:
    """Writes lines to the log in `directory`. Both files together have at most `limit_bytes`, or
    one line more. 0: nothing is written."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._path = directory / LOG_FILE
        self._old = directory / OLD_LOG_FILE
        self._limit = limit_bytes // 2  # of each of the two files
        self._fd: int | None = None
        self._size = 0

    def write(self, lines: Iterable[bytes]) -> None:
        """Write lines, which are given without their ends."""
        if not self._limit:
            return
        with contextlib.suppress(OSError):
            for line in lines:
                self._write(line[:MAX_LINE_BYTES] + b"\n")

    def _write(self, line: bytes) -> None:
        if self._fd is not None and self._size + len(line) > self._limit:
            self.close()
            os.replace(self._path, self._old)
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size
        self._size += os.write(self._fd, line)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def keeping(
    directory: Path, limit_mib: int, terminal: Terminal, *, kept_in: Path | None = None
) -> Iterator[ServerLog]:
    """Yield the log of a server, to which the lines of `terminal` are added.

    kept_in   directory to which the log is moved at the end, in place of an earlier one; None: it
              ends with the run directory
    """
    log = ServerLog(directory, limit_mib << 20)
    terminal.keep_lines(log.write)
    try:
        yield log
    finally:
        log.close()
        if kept_in is not None:
            with contextlib.suppress(OSError):
                _move(directory, kept_in)


def _move(directory: Path, to: Path) -> None:
    """Move the log in `directory` to another one, which only its owner can read."""
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (OLD_LOG_FILE, LOG_FILE):
        (to / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.move(directory / name, to / name)  # a run directory may be on another disk


def ended_logs(home: Path) -> Path:
    """Return the parent of the directories with the logs of ended servers, named by port."""
    return home / "logs"


class LogReader:
    """Reads the log in `directory`, also while it is written and rotated."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOG_FILE
        self._old = directory / OLD_LOG_FILE
        self._fd: int | None = None
        self._unfinished = b""

    def read(self) -> list[bytes]:
        """Return the complete lines that were added since the last call; at the first call all
        lines. Lines that were rotated away between two calls are missing."""
        data = b""
        if self._fd is None:
            self._open(self._old) or self._open(self._path)
        while self._fd is not None:
            data += self._rest()
            follower = self._follower()
            if follower is None:
                break
            data += self._rest()  # what was added between the last read and the rotation
            self._open(follower)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return lines

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _rest(self) -> bytes:
        assert self._fd is not None
        parts = []
        while part := os.read(self._fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)

    def _follower(self) -> Path | None:
        """Return the log file that continues the open one; None if the open one is the newest, or
        there is no file. If the open file has been removed, return the oldest file, perhaps of a
        new server. Nothing is added to a file that another one continues."""
        own, old, new = map(_identity, (self._fd, self._old, self._path))
        if own == new:
            return None
        if old is not None and own != old:
            return self._old
        return self._path if new is not None else None

    def _open(self, path: Path) -> bool:
        """Open a file in place of the open one. Return False if there is no such file."""
        try:
            opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        self.close()
        self._fd = opened
        return True


def _identity(file: int | Path | None) -> tuple[int, int] | None:
    """Return what identifies a file, whatever its name is; None if it does not exist."""
    if file is None:
        return None
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
