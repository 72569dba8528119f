"""Downloads one file over HTTP, resumes after a lost connection, and verifies the digest.

A partial file, FILE.partial, stays if a download fails or is killed. The next download continues it
with a Range request. The file gets its final name only if its size and digest are right.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from protocol.process.exit_codes import ExitCode
from tools.failure import Failure

PARTIAL = ".partial"
PIECE_BYTES = 1 << 20
START_BYTES = 1 << 20
"""Size of the start of a GGUF file that is checked before the download. It contains the file's
architecture, and it is larger than any valid count of tensors or metadata, which the check compares
with the size of the file that it reads."""
RETRIES = 5
"""Retries in a row, without a byte received between them, after which a download fails."""
RETRY_S = 1.0
DownloadProblem = Literal["unknown", "terms", "network", "other"]


class NoDownload(Failure):
    """A model could not be downloaded or stored.

    cause   unknown: there is no such model; terms: its files are only for users who accepted its
            terms; network: the server did not answer, or the connection was lost; other: the
            message has the cause
    """

    def __init__(self, message: str, cause: DownloadProblem = "other") -> None:
        super().__init__(message, exit_code=ExitCode.NO_DOWNLOAD)
        self.cause = cause


class NoSpace(Failure):
    """The disk is too small for a download. Sizes are in bytes."""

    def __init__(self, message: str, *, needed: int, free: int) -> None:
        super().__init__(message)
        self.needed, self.free = needed, free


class ConnectionLost(Exception):
    """Raised if the connection was lost, or the server was too busy to answer. The text describes
    the cause. The request may be repeated."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """The digest that a file must have."""

    #: Digest in lower-case hex.
    value: str
    #: Whether `value` is the SHA-1 under which git stores the file, rather than a SHA-256.
    is_git: bool = False

    def start(self, size: int) -> Any:
        """Return a new hash object for a file of `size` bytes."""
        if not self.is_git:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    def __str__(self) -> str:
        return f"{'git sha1' if self.is_git else 'sha256'} {self.value}"

    @property
    def tagged(self) -> str:
        """The digest as container registries and Ollama write it: "sha256:HEX"."""
        return f"{'sha1' if self.is_git else 'sha256'}:{self.value}"

    def matches(self, file: Path) -> bool:
        """Return whether `file` has this digest."""
        digest = self.start(file.stat().st_size)
        _hash_file(file, digest)
        return bool(digest.hexdigest() == self.value)


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a response."""

    #: Position of its first byte in the file. 0 if the server ignored the Range header.
    start: int
    #: The bytes. Iterating raises ConnectionLost if the connection is lost.
    pieces: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class FileProgress:
    """The progress of a download with one of its files. Sizes are in bytes."""

    #: Digest of the file: "sha256:HEX", or "sha1:HEX" as git has it.
    digest: str
    total: int
    completed: int


OnProgress = Callable[[FileProgress], object]


def no_progress(progress: FileProgress) -> None:
    """Ignore the progress of a download."""


class Source(Protocol):
    """A file on a server."""

    def open(self, offset: int) -> AbstractContextManager[Body]:
        """Request the file from `offset` on. Raises ConnectionLost if a retry may help."""


def partial_of(target: Path) -> Path:
    """Return the path of the partial file of a download to `target`."""
    return target.with_name(target.name + PARTIAL)


def partial_bytes(target: Path) -> int:
    """Return the size of the partial file of a download to `target`; 0 if there is none."""
    partial = partial_of(target)
    return partial.stat().st_size if partial.is_file() else 0


def download(
    source: Source,
    target: Path,
    *,
    size: int,
    checksum: Checksum,
    on_bytes: Callable[[int], object],
) -> None:
    """Write the file of `source` to `target`, continuing a partial file if there is one.

    on_bytes   called with the number of bytes found in the partial file or received, and with a
               negative number if bytes must be received again

    Raises Failure if the digest or the size is wrong, and ConnectionLost after too many retries.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(target)
    if partial_bytes(target) > size:
        partial.unlink()
    done = partial_bytes(target)
    digest = checksum.start(size)
    if done:
        _hash_file(partial, digest)
        on_bytes(done)
    retries = 0
    with partial.open("ab") as sink:
        while done < size:
            before = done
            try:
                with source.open(done) as body:
                    if body.start != done:
                        sink.truncate(0)
                        on_bytes(-done)
                        done, digest = 0, checksum.start(size)
                    for piece in body.pieces:
                        sink.write(piece)
                        digest.update(piece)
                        done += len(piece)
                        on_bytes(len(piece))
                        if done > size:
                            break
                if done < size:  # some HTTP libraries end a body early without an error
                    raise ConnectionLost("the server closed the connection too early")
            except ConnectionLost:
                retries = 0 if done > before else retries + 1
                if retries > RETRIES:
                    raise
                time.sleep(RETRY_S)
        sink.flush()
        os.fsync(sink.fileno())
    if done != size or digest.hexdigest() != checksum.value:
        partial.unlink()
        found = f"{done} bytes" if done != size else digest.hexdigest()
        expected = f"{size} bytes" if done != size else checksum
        message = f"{target.name} is not the expected file: {found} instead of {expected}"
        raise Failure(message, exit_code=ExitCode.NO_DOWNLOAD)
    partial.replace(target)


def check_start(source: Source, target: Path, check: Callable[[Path], object]) -> None:
    """Check the first bytes of a GGUF file before it is downloaded: call `check` with a temporary
    file that contains them.

    Skip the check if `target` has a partial download, or if the connection is lost, because the
    download retries after a lost connection. Raises the exceptions of `check`.
    """
    if partial_bytes(target):
        return
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".gguf") as start:
        try:
            with source.open(0) as body:
                while start.tell() < START_BYTES and (piece := next(body.pieces, b"")):
                    start.write(piece)
        except ConnectionLost:
            return
        start.flush()
        check(Path(start.name))


def _hash_file(file: Path, digest: Any) -> None:
    with file.open("rb") as source:
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
