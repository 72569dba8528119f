"""Records in a file: each as the frames of a message (protocol/wire.py), counted and measured.

A file is bounded; so is their number in a directory, whose oldest ones go. What an engine that was
killed has written is there: nothing is kept back.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from engine_core.journal.records import AnyRecord, Full, Record
from protocol import wire
from protocol.errors import WireError

log = logging.getLogger(__name__)

SUFFIX = ".journal"
KEPT_FILES = 4
_UINT32 = struct.Struct("<I")


class Writer:
    """Of one engine's life. Raises OSError where the directory cannot be had, PermissionError where
    others may enter it."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        _make_private(directory)
        _make_room(directory)
        name = time.strftime("engine-%Y%m%d-%H%M%S", time.gmtime()) + f"-{os.getpid()}{SUFFIX}"
        self.path = directory / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self.path, flags, 0o600), "wb", buffering=0)
        self._left = max_bytes
        self._is_full = False

    def write(self, record: Record) -> None:
        """Nothing, once the file is full, or the disk is: serving goes on."""
        if self._is_full:
            return
        data = _packed(record)
        self._left -= len(data)
        try:
            if self._left >= 0:
                self._file.write(data)
            else:
                self._end("is full")
                self._file.write(_packed(Full()))
        except OSError as error:
            self._end(f"cannot be written: {error}")

    def close(self) -> None:
        self._file.close()

    def _end(self, why: str) -> None:
        self._is_full = True
        log.warning("the journal %s %s; it ends here", self.path, why)


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


def _packed(record: Record) -> bytes:
    frames = [bytes(frame) for frame in wire.encode(record)]
    sized = [_UINT32.pack(len(frame)) + frame for frame in frames]
    return _UINT32.pack(len(frames)) + b"".join(sized)


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise PermissionError(f"{directory} must be a directory that only its owner can enter")


def _make_room(directory: Path) -> None:
    for old in sorted(directory.glob(f"engine-*{SUFFIX}"))[: 1 - KEPT_FILES or None]:
        old.unlink(missing_ok=True)
