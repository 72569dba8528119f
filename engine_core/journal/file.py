"""Records in a file: each as the frames of a message (protocol/wire.py), counted and measured.

A file is bounded, and followed by another; so is their number in a directory, whose oldest ones go.
What an engine that was killed has written is there: nothing is kept back.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from engine_core.journal.records import AnyRecord, Full, JournalRecord
from protocol import wire
from protocol.errors import WireError

log = logging.getLogger(__name__)

SUFFIX = ".journal"
KEPT_FILES = 4
SPARE = 8
"""A part in so many of a file is left for what comes before the next one can begin."""
_UINT32 = struct.Struct("<I")


class Writer:
    """Of one engine's life, in one file or, as they get full, several. Raises OSError where the
    directory cannot be had, PermissionError where others may enter it.

    path    of the file that is written now;  part  its number in this life, from 1 on
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        _make_private(directory)
        self._directory = directory
        self._max_bytes = max_bytes
        self._has_ended = False
        self._is_full = False
        self.part = 0
        self._open_next()

    @property
    def is_nearly_full(self) -> bool:
        """Whoever can begin another one should."""
        return not self._has_ended and self._left < self._max_bytes // SPARE

    def write(self, record: JournalRecord) -> None:
        """Nothing, once the file is full, or the disk is: serving goes on."""
        if self._is_full or self._has_ended:
            return
        data = _packed(record)
        self._left -= len(data)
        try:
            if self._left >= 0:
                self._file.write(data)
            else:
                self._is_full = True
                self._file.write(_packed(Full()))
        except OSError as error:
            self.end(f"cannot be written: {error}")

    def begin_next(self, records: Iterable[JournalRecord]) -> None:
        """In another file, which begins with these. Where they alone take half of it, nothing is
        written any more."""
        try:
            self._file.close()
            self._open_next()
        except OSError as error:
            self.end(f"cannot be gone on with: {error}")
            return
        for record in records:
            self.write(record)
        if self._left < self._max_bytes // 2:
            self.end("is too small for what this engine knows (--journal-mib)")

    def end(self, why: str) -> None:
        """For good; the engine serves on."""
        self._has_ended = True
        log.warning("the journal %s %s; it ends here", self.path, why)

    def close(self) -> None:
        self._file.close()

    def _open_next(self) -> None:
        _make_room(self._directory)
        self.part += 1
        began = time.strftime("engine-%Y%m%d-%H%M%S", time.gmtime())
        self.path = self._directory / f"{began}-{os.getpid()}-{self.part:04}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self.path, flags, 0o600), "wb", buffering=0)
        self._left = self._max_bytes
        self._is_full = False


def journals_in(directory: Path) -> list[Path]:
    """Return the journals of a directory, oldest first: their names begin with the time."""
    return sorted(directory.glob(f"engine-*{SUFFIX}"))


def read(path: Path) -> Iterator[AnyRecord]:
    """In their order, up to the last whole one: an engine that was killed may have left a part of
    one. Raises WireError on anything that is no journal, OSError."""
    decoder: wire.Decoder[AnyRecord] = wire.Decoder(AnyRecord)
    with path.open("rb") as file:
        while head := file.read(_UINT32.size):
            frames = []
            if len(head) < _UINT32.size or (count := _UINT32.unpack(head)[0]) > wire.MAX_FRAMES:
                if len(head) < _UINT32.size:
                    return
                raise WireError(f"a record of {count} frames: this is no journal")
            for _ in range(count):
                size = file.read(_UINT32.size)
                data = file.read(_UINT32.unpack(size)[0]) if len(size) == _UINT32.size else b""
                if len(size) < _UINT32.size or len(data) < _UINT32.unpack(size)[0]:
                    return
                frames.append(data)
            yield decoder.decode(frames)


def _packed(record: JournalRecord) -> bytes:
    frames = [bytes(frame) for frame in wire.encode(record)]
    sized = [_UINT32.pack(len(frame)) + frame for frame in frames]
    return _UINT32.pack(len(frames)) + b"".join(sized)


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise PermissionError(f"{directory} must be a directory that only its owner can enter")


def _make_room(directory: Path) -> None:
    for old in journals_in(directory)[: 1 - KEPT_FILES or None]:
        old.unlink(missing_ok=True)
