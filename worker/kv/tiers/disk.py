"""Blocks in a directory: one file each, whole or absent, the least recently used go first.

```
DIR/                              mode 0700, ours
    <layout, 32 hex digits>/      blocks of other models stay what they are, and count in the bound
        <chained hash, 64 hex>    mode 0600, block_file.py; last modified when last used
        .<random>.part            being written; renamed when whole
```

There is no other file and no lock: names are content, so two servers that share a directory can
only agree. What one of them writes or removes the other learns when it looks again: after a minute,
or when it has itself written a thirty-second of the bound. By so much per further server the
directory may be larger for a while.

A file that is not what its name says is removed and told as `DamagedBlockFile`. A directory that
cannot be written, as a full disk, is no failure: nothing is stored for a while.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

from protocol import sockets
from worker.kv.layout import DIGEST_BYTES as LAYOUT_BYTES
from worker.kv.tiers.block_file import HASH_BYTES, HEADER_BYTES, DamagedBlockFile, check, header_of
from worker.kv.tiers.disk_index import DiskIndex, Key

log = logging.getLogger(__name__)

LOOK_S = 60.0
LOOK_SHARE = 32
"""The directory is looked through after so long, and when one part in so many was written anew."""
PAUSE_S = 60.0
"""After a failed write nothing is stored for so long."""
ABANDONED_S = 3600.0
"""A file that is still being written after so long has no writer any more."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class BlockLost(Exception):
    """A block is not where it was."""


class DiskTier:
    """Blocks of `payload_bytes` of one layout. Its methods may be called from any thread.

    Raises OSError, saying why, for a directory that is not ours alone or cannot be made.
    """

    def __init__(
        self,
        root: Path,
        layout: bytes,
        *,
        payload_bytes: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file_bytes = HEADER_BYTES + payload_bytes
        if max_bytes < self.file_bytes:
            raise ValueError(f"{max_bytes:,} bytes hold no block of {self.file_bytes:,} bytes")
        self._root = root.resolve()
        self._layout = layout
        self._clock = clock
        self._lock = Lock()  # of all below; never held while a file is read or written
        self._index = DiskIndex(layout, max_bytes)
        self._paused_until = 0.0
        self._is_failing = False
        self._max_new_bytes = max_bytes // LOOK_SHARE
        self._num_new_bytes = 0  # since we looked
        self._look_at = 0.0
        self.look()

    def __contains__(self, content: bytes) -> bool:
        with self._lock:
            return Key(self._layout, content) in self._index

    @property
    def num_bytes(self) -> int:
        """In the whole directory, as far as is known."""
        with self._lock:
            return self._index.num_bytes

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(appeared, disappeared) since this was asked last; at first, all that is there."""
        with self._lock:
            return self._index.changes.take()

    def touch(self, content: bytes) -> None:
        """It is used: it goes last, whatever server looks."""
        key = Key(self._layout, content)
        if content in self:
            with contextlib.suppress(OSError):  # then it may go earlier, and that is all
                os.utime(self._path(key))
            with self._lock:
                self._index.touch(key)

    # ---- a block

    def store(self, content: bytes, payload: memoryview) -> bool:
        """False where it could not be written, now or a moment ago."""
        key = Key(self._layout, content)
        with self._lock:
            if key in self._index:
                return True
            if self._clock() < self._paused_until:
                return False
            gone = self._index.evict_for(self.file_bytes)
        try:
            self._unlink(gone)
            self._write(self._path(key), header_of(self._layout, content, payload), payload)
        except OSError as error:
            self._pause(error)
            return False
        with self._lock:
            self._index.add(key, self.file_bytes)
            self._num_new_bytes += self.file_bytes
            if self._is_failing:
                log.info("blocks are stored in %s again", self._root)
                self._is_failing = False
        return True

    def load(self, content: bytes, into: memoryview) -> None:
        """Fill `into` [payload_bytes]. Raises Lost, or Damaged: then its file goes, and `into`
        holds anything."""
        key = Key(self._layout, content)
        path = self._path(key)
        try:
            header = self._read(path, into)
            check(header, into, self._layout, content)
        except FileNotFoundError:
            self._forget(key)
            raise BlockLost("its file is gone") from None
        except DamagedBlockFile:
            self._forget(key)
            with contextlib.suppress(OSError):  # then somebody may find it once more
                self._unlink([key])
            raise
        except OSError as error:
            self._forget(key)  # until somebody looks again
            raise BlockLost(f"its file cannot be read: {error.strerror}") from error
        self.touch(content)

    def _read(self, path: Path, into: memoryview) -> bytearray:
        """The header. Raises Damaged for a file of another size."""
        header = bytearray(HEADER_BYTES)
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            if size != self.file_bytes or os.readv(file, [header, into]) != size:
                raise DamagedBlockFile(f"it has {size:,} bytes instead of {self.file_bytes:,}")
        finally:
            os.close(file)
        return header

    def _write(self, path: Path, header: bytes, payload: memoryview) -> None:
        """Nobody sees a part of it. It need not survive a power cut: what did not is damaged."""
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            file = os.open(part, _CREATE, 0o600)
            try:
                written = os.writev(file, [header, payload])
            finally:
                os.close(file)
            if written != self.file_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # man 2 write
            part.rename(path)
        except OSError:
            with contextlib.suppress(OSError):  # the error above says more
                part.unlink(missing_ok=True)
            raise

    def _pause(self, error: OSError) -> None:
        with self._lock:
            self._paused_until = self._clock() + PAUSE_S
            is_new, self._is_failing = not self._is_failing, True
        if is_new:
            log.warning("blocks cannot be stored in %s for now: %s", self._root, error)

    # ---- the directory

    def look(self) -> None:
        """Learn what is there, which others may have changed, and keep the bound.

        Raises OSError.
        """
        sockets.make_private(self._root / self._layout.hex())
        found = dict(self._scan())
        with self._lock:
            self._index.replace(found)
            gone = self._index.evict_for(0)
            self._num_new_bytes = 0
            self._look_at = self._clock() + LOOK_S
        self._unlink(gone)

    def look_if_due(self) -> None:
        """By the thread that stores, for what is stored meanwhile would be overlooked. A directory
        that cannot be read holds nothing, until it can be."""
        if self._num_new_bytes > self._max_new_bytes or self._clock() >= self._look_at:
            try:
                self.look()
            except OSError as error:  # somebody moved it away, perhaps: try again later
                self._pause(error)
                with self._lock:
                    self._index.replace({})
                    self._look_at = self._paused_until

    def _directories(self) -> Iterator[Path]:
        for path in self._root.iterdir():
            if _named(path.name, LAYOUT_BYTES) is not None and path.is_dir():
                yield path

    def _scan(self) -> Iterator[tuple[Key, tuple[float, int]]]:
        """(which block, (last use, size)) of every file that has a block's name."""
        for directory in self._directories():
            layout = bytes.fromhex(directory.name)
            for entry in os.scandir(directory):
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another server has removed it
                content = _named(entry.name, HASH_BYTES)
                if content is not None and stat.S_ISREG(info.st_mode):
                    yield Key(layout, content), (info.st_mtime, info.st_size)
                elif entry.name.endswith(".part") and time.time() - info.st_mtime > ABANDONED_S:
                    Path(entry.path).unlink(missing_ok=True)

    def _path(self, key: Key) -> Path:
        return self._root / key.layout.hex() / key.content.hex()

    def _unlink(self, keys: list[Key]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._index.remove(key)


def _named(name: str, num_bytes: int) -> bytes | None:
    """What so many bytes in lower-case hex digits stand for; None for another name."""
    if len(name) != 2 * num_bytes or not set(name) <= set("0123456789abcdef"):
        return None
    return bytes.fromhex(name)
