"""Journal files: writes records to files, and reads them back.

A record is stored as the frames of a message (protocol/wire/codec.py), each preceded by its length.
The size of a file is bounded; when it is nearly full, another file is started. At most KEPT_FILES
files are kept in the directory; the oldest are deleted. Writes are unbuffered, so the file of a
killed engine contains every record that was written.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from engine_core.journal.records import AnyRecord, FullRecord, JournalRecord
from protocol.wire import codec
from protocol.wire.errors import WireError

log = logging.getLogger(__name__)

SUFFIX = ".journal"
KEPT_FILES = 4
SPARE_DIVISOR = 8
"""1 / SPARE_DIVISOR of a file is reserved for records written before the next file can be started.
"""
RESULTS_DIVISOR = 4
"""The next file is started only when at most 1 / RESULTS_DIVISOR of it would be results of encoding
that the engine holds. There can be hundreds of MiB of them while clients do not read.
"""
_UINT32 = struct.Struct("<I")


class Writer:
    """Writes the journal of one engine process, in one or more files.

    The constructor raises OSError if no file can be created in the directory, and PermissionError
    if other users can enter the directory.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        _make_private(directory)
        self._directory = directory
        self._max_bytes = max_bytes
        self._has_ended = False
        self._is_full = False
        #: Number of the current file, `path`, from 1 on.
        self.part = 0
        self._open_next()

    @property
    def is_nearly_full(self) -> bool:
        """Whether little of the file's size is left, so that the caller should start another file
        (`start_next`)."""
        return not self._has_ended and self._left < self._max_bytes // SPARE_DIVISOR

    def may_start_next(self, num_result_bytes: int) -> bool:
        """Return whether to start another file now, as this one is nearly full.

        num_result_bytes   bytes of the results of encoding that the snapshot would contain
        """
        return num_result_bytes <= self._max_bytes // RESULTS_DIVISOR

    def write(self, record: JournalRecord) -> None:
        """Write a record. If the file has no room for it, drop it and all later records of the
        file, and write a FullRecord instead.

        If the disk is full, or another error occurs, the journal ends and the engine continues.
        """
        if self._is_full or self._has_ended:
            return
        data = _packed(record)
        self._left -= len(data)
        try:
            if self._left >= 0:
                self._file.write(data)
            else:
                self._is_full = True
                log.warning(
                    "the journal %s is full; the records until its next file are missing", self.path
                )
                self._file.write(_packed(FullRecord()))
        except OSError as error:
            self.end(f"cannot be written: {error}")

    def start_next(self, records: Iterable[JournalRecord]) -> int:
        """Start another file with these records, and return their size in bytes.

        If they fill more than half of the file, or the file cannot be written, the journal ends and
        0 is returned.
        """
        try:
            self._file.close()
            self._open_next()
        except OSError as error:
            self.end(f"cannot be continued: {error}")
            return 0
        for record in records:
            self.write(record)
        if self._left < self._max_bytes // 2:
            self.end("is too small for the state of this engine (--journal-mib)")
        return 0 if self._has_ended else self._max_bytes - self._left

    def end(self, why: str) -> None:
        """End the journal: later records are not written. `why` is for the log."""
        self._has_ended = True
        log.warning("the journal %s %s; it ends here", self.path, why)

    def close(self) -> None:
        self._file.close()

    def _open_next(self) -> None:
        _make_room(self._directory)
        self.part += 1
        prefix = time.strftime("engine-%Y%m%d-%H%M%S", time.gmtime())
        self.path = self._directory / f"{prefix}-{os.getpid()}-{self.part:04}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self.path, flags, 0o600), "wb", buffering=0)
        self._left = self._max_bytes
        self._is_full = False


def list_journals(directory: Path) -> list[Path]:
    """Return the journals in a directory, oldest first. Their names start with the time."""
    return sorted(directory.glob(f"engine-*{SUFFIX}"))


def read(path: Path) -> Iterator[AnyRecord]:
    """Yield the records of a journal in order.

    A partial record at the end, which a killed engine may have left, is ignored. Raises OSError,
    and WireError if the file is not a journal.
    """
    decoder: codec.Decoder[AnyRecord] = codec.Decoder(AnyRecord)
    with path.open("rb") as file:
        while head := file.read(_UINT32.size):
            frames = []
            if len(head) < _UINT32.size or (count := _UINT32.unpack(head)[0]) > codec.MAX_FRAMES:
                if len(head) < _UINT32.size:
                    return
                raise WireError(f"not a journal: a record of {count} frames")
            for _ in range(count):
                size = file.read(_UINT32.size)
                data = file.read(_UINT32.unpack(size)[0]) if len(size) == _UINT32.size else b""
                if len(size) < _UINT32.size or len(data) < _UINT32.unpack(size)[0]:
                    return
                frames.append(data)
            yield decoder.decode(frames)


def _packed(record: JournalRecord) -> bytes:
    """Return the record as: number of frames, then length and bytes of each frame."""
    frames = [bytes(frame) for frame in codec.encode(record)]
    sized = [_UINT32.pack(len(frame)) + frame for frame in frames]
    return _UINT32.pack(len(frames)) + b"".join(sized)


def _make_private(directory: Path) -> None:
    """Create the directory. Raises PermissionError if other users can enter it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise PermissionError(f"{directory} must be a directory that only its owner can enter")


def _make_room(directory: Path) -> None:
    """Delete the oldest journals, so that fewer than KEPT_FILES remain."""
    for old in list_journals(directory)[: 1 - KEPT_FILES or None]:
        old.unlink(missing_ok=True)
