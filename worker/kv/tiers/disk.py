"""Disk tier: a directory with one file for each block and for each state. A file is complete or
absent. The least recently used files are evicted.

```
DIR/                              mode 0700, owned by this user
    <layout, 32 hex digits>/      blocks of other models are kept, and count towards the limit
        <chained hash, 64 hex>    mode 0600; modified when last used
        .<random>.part            being written; renamed when complete
    <layout of states>/           likewise; a state has the hash of the block that it follows
```

There are no other files and no lock. Names are derived from contents, so two servers that share a
directory cannot disagree. A server notices the other's changes at its next scan: after a minute, or
after it has itself written 1/32 of the limit. So each additional server can make the directory
exceed the limit by another 1/32 for a while.

A file starts with a header that identifies its block. The block's bytes follow:

```
offset  bytes
0       8      "tidegate"
8       4      format version, uint32 LE
12      8      length of the payload, uint64 LE
20      16     layout: digest of model, dtype, shape and kernels (worker/kv/layout.py); that of a
               state differs from that of a block
36      32     content: the block's chained hash (engine_core/blocks/hash.py)
68      32     SHA-256 of the 68 bytes before and of the payload
100            the payload
```

The reader compares the first 68 bytes with those it expects, and the stored digest with the digest
of the bytes that it has read. So a file that was truncated, swapped, partly written, or changed in
any bit is never used as K/V.

A file that does not match its name is deleted and reported as `DamagedBlockFile`. If the directory
cannot be written, for example because the disk is full, storing pauses for a while; that is not an
error.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from protocol.wire import sockets
from protocol.worker.kv import HASH_BYTES, block_hash, is_state_key, state_key
from worker.kv.layout import DIGEST_BYTES as LAYOUT_BYTES
from worker.kv.tiers.changes import Changes

MAGIC = b"tidegate"
VERSION = 1
_FIELDS = struct.Struct(f"<8sIQ{LAYOUT_BYTES}s{HASH_BYTES}s")
HEADER_BYTES = _FIELDS.size + HASH_BYTES

Buffer = bytes | bytearray | memoryview
Payload = Sequence[Buffer]
"""The parts of a payload, in their order in the file."""
MAX_PARTS = os.sysconf("SC_IOV_MAX") - 1
"""Most parts that one call of the system reads or writes, beside the header."""


class DamagedBlockFile(Exception):
    """Raised if a file differs from what was stored in it. The message describes the difference."""


def make_header(layout: bytes, content: bytes, payload: Payload) -> bytes:
    """Return the header of a block's file, HEADER_BYTES long. This reads the whole payload, because
    the header contains its digest."""
    fields = _FIELDS.pack(MAGIC, VERSION, sum(map(len, payload)), layout, content)
    return fields + _digest(fields, payload)


def check_block_file(header: Buffer, payload: Payload, layout: bytes, content: bytes) -> None:
    """Raise DamagedBlockFile unless `header` belongs to this payload, layout and content."""
    expected = _FIELDS.pack(MAGIC, VERSION, sum(map(len, payload)), layout, content)
    fields, digest = bytes(header[: _FIELDS.size]), bytes(header[_FIELDS.size :])
    if fields != expected:
        raise DamagedBlockFile("its header does not match this block")
    if digest != _digest(expected, payload):
        raise DamagedBlockFile("its checksum does not match its content")


def _digest(fields: bytes, payload: Payload) -> bytes:
    state = sha256(fields)
    for part in payload:
        state.update(part)
    return state.digest()


class BlockKey(NamedTuple):
    """Identity of a file in the directory: its layout, and the chained hash of its block. The file
    of a state has the layout of states."""

    layout: bytes
    content: bytes


class StoredLayout(NamedTuple):
    """A layout, and the bytes of a block, or of a state, in it."""

    digest: bytes
    payload_bytes: int

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes


class DiskIndex:
    """Index of the directory: the size of each block's file, in the order of last use. It contains
    the blocks of all layouts, but `changes` lists only the keys of blocks of `layout`, and of
    states of `state_layout`. Not thread-safe."""

    def __init__(self, layout: bytes, max_bytes: int, state_layout: bytes = b"") -> None:
        self.num_bytes = 0
        self._layout, self._state_layout = layout, state_layout
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[BlockKey, int] = OrderedDict()  # least recently used first
        self.changes = Changes()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        """Return the number of blocks of all layouts."""
        return len(self._sizes)

    def add(self, key: BlockKey, size: int) -> None:
        """Add a block with the size of its file. A block that exists is marked as used."""
        self.num_bytes += size - self._sizes.get(key, 0)
        if key not in self._sizes:
            self._record(key, self.changes.add)
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def touch(self, key: BlockKey) -> None:
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: BlockKey) -> None:
        size = self._sizes.pop(key, None)
        if size is not None:
            self.num_bytes -= size
            self._record(key, self.changes.remove)

    def evict_for(self, size: int) -> list[BlockKey]:
        """Remove the least recently used blocks until `size` more bytes fit, and return them. The
        caller deletes their files."""
        evicted = []
        while self._sizes and self.num_bytes + size > self._max_bytes:
            key = next(iter(self._sizes))
            self.remove(key)
            evicted.append(key)
        return evicted

    def replace(self, found: Mapping[BlockKey, tuple[float, int]]) -> None:
        """Make the index equal to the directory's blocks `found`: block -> (last use, size)."""
        for key in [key for key in self._sizes if key not in found]:
            self.remove(key)
        for key, (_, size) in sorted(found.items(), key=lambda item: item[1][0]):
            self.add(key, size)

    def _record(self, key: BlockKey, change: Callable[[bytes], None]) -> None:
        if key.layout == self._layout:
            change(key.content)
        elif key.layout == self._state_layout:
            change(state_key(key.content))


log = logging.getLogger(__name__)

SCAN_S = 60.0
SCAN_SHARE = 32
"""The directory is scanned every SCAN_S seconds, and after 1/SCAN_SHARE of the limit was
written."""
PAUSE_S = 60.0
"""Time for which storing pauses after a failed write."""
ABANDONED_S = 3600.0
"""Age at which a partial file is deleted, because its writer must have ended."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class BlockLost(Exception):
    """Raised if a block is no longer in the directory, or cannot be read."""


class DiskTier:
    """Stores and loads the blocks of one layout, and states. They are known by their keys
    (protocol/worker/kv.py). Thread-safe.

    layout   that of the blocks
    states   that of the states; None: the model has none

    Raises OSError if the directory is not private to this user, or cannot be created, and
    ValueError if `max_bytes` is less than one block or state.
    """

    def __init__(
        self,
        root: Path,
        layout: StoredLayout,
        states: StoredLayout | None = None,
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for each, name in ((layout, "block"), (states, "state")):
            if each is not None and max_bytes < each.file_bytes:
                raise ValueError(
                    f"{max_bytes:,} bytes are less than one {name} ({each.file_bytes:,} bytes)"
                )
        self._root = root.resolve()
        self._blocks, self._states = layout, states
        self._clock = clock
        self._lock = Lock()  # guards all fields below; never held during file I/O
        state_layout = b"" if states is None else states.digest
        self._index = DiskIndex(layout.digest, max_bytes, state_layout)
        self._paused_until = 0.0
        self._is_failing = False
        self._max_new_bytes = max_bytes // SCAN_SHARE
        self._num_new_bytes = 0  # since the last scan
        self._scan_at = 0.0
        self.scan()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._file_key(key) in self._index

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole directory, as of the last scan plus this server's own
        writes."""
        with self._lock:
            return self._index.num_bytes

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys (added, removed) since the last call. The first call returns all existing
        blocks and states of this model as added."""
        with self._lock:
            return self._index.changes.drain()

    def touch(self, key: bytes) -> None:
        """Mark a block as used, for all servers that share the directory."""
        if key in self:
            file_key = self._file_key(key)
            with contextlib.suppress(OSError):  # if this fails, the block may be evicted earlier
                os.utime(self._path(file_key))
            with self._lock:
                self._index.touch(file_key)

    # ---- a block, or a state

    def store(self, key: bytes, payload: Payload) -> bool:
        """Store a block. Return False if it cannot be written, or if storing pauses after a failed
        write."""
        file_key, size = self._file_key(key), self._layout_of(key).file_bytes
        with self._lock:
            if file_key in self._index:
                return True
            if self._clock() < self._paused_until:
                return False
            evicted = self._index.evict_for(size)
        try:
            self._unlink(evicted)
            self._write(self._path(file_key), make_header(*file_key, payload), payload)
        except OSError as error:
            self._pause(error)
            return False
        with self._lock:
            self._index.add(file_key, size)
            self._num_new_bytes += size
            if self._is_failing:
                log.info("blocks are stored in %s again", self._root)
                self._is_failing = False
        return True

    def load(self, key: bytes, into: Payload) -> None:
        """Read a block into `into`, whose parts have payload_bytes together. Raises BlockLost or
        DamagedBlockFile; the contents of `into` are undefined then. A damaged file is deleted."""
        file_key = self._file_key(key)
        path = self._path(file_key)
        try:
            header = self._read(path, into, self._layout_of(key).file_bytes)
            check_block_file(header, into, *file_key)
        except FileNotFoundError:
            self._forget(file_key)
            raise BlockLost("its file no longer exists") from None
        except DamagedBlockFile:
            self._forget(file_key)
            with contextlib.suppress(OSError):  # if this fails, a later scan may find the file
                self._unlink([file_key])
            raise
        except OSError as error:
            self._forget(file_key)  # until the next scan
            raise BlockLost(f"its file cannot be read: {error.strerror}") from error
        self.touch(key)

    def _layout_of(self, key: bytes) -> StoredLayout:
        if not is_state_key(key):
            return self._blocks
        assert self._states is not None, "the model has no states"
        return self._states

    def _file_key(self, key: bytes) -> BlockKey:
        return BlockKey(self._layout_of(key).digest, block_hash(key))

    def _read(self, path: Path, into: Payload, expected: int) -> bytearray:
        """Read a file's payload into `into`, and return its header. Raises DamagedBlockFile if the
        file has not the `expected` size."""
        header = bytearray(HEADER_BYTES)
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            if size != expected or _move(os.readv, file, header, into) != size:
                raise DamagedBlockFile(f"it has {size:,} bytes instead of {expected:,}")
        finally:
            os.close(file)
        return header

    def _write(self, path: Path, header: bytes, payload: Payload) -> None:
        """Write a file, and rename it when complete. The file is not synced: a power cut may damage
        it, and the checksum detects that."""
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            file = os.open(part, _CREATE, 0o600)
            try:
                written = _move(os.writev, file, header, payload)
            finally:
                os.close(file)
            if written != HEADER_BYTES + sum(map(len, payload)):  # the disk is full (man 2 write)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            part.rename(path)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is raised below
                part.unlink(missing_ok=True)
            raise

    def _pause(self, error: OSError) -> None:
        with self._lock:
            self._paused_until = self._clock() + PAUSE_S
            is_new, self._is_failing = not self._is_failing, True
        if is_new:
            log.warning("blocks cannot be stored in %s for now: %s", self._root, error)

    # ---- the directory

    def scan(self) -> None:
        """Read the directory, which other servers may have changed, and delete files until it is
        within its limit. Raises OSError if it cannot be read."""
        for each in (self._blocks, self._states):
            if each is not None:
                sockets.make_private(self._root / each.digest.hex())
        found = dict(self._list_blocks())
        with self._lock:
            self._index.replace(found)
            evicted = self._index.evict_for(0)
            self._num_new_bytes = 0
            self._scan_at = self._clock() + SCAN_S
        self._unlink(evicted)

    def scan_if_due(self) -> None:
        """Scan if a scan is due. Only the thread that stores calls this, because a scan misses a
        block that is stored meanwhile. A directory that cannot be read counts as empty until a scan
        succeeds."""
        if self._num_new_bytes > self._max_new_bytes or self._clock() >= self._scan_at:
            try:
                self.scan()
            except OSError as error:  # the directory may have been moved: try again later
                self._pause(error)
                with self._lock:
                    self._index.replace({})
                    self._scan_at = self._paused_until

    def _directories(self) -> Iterator[Path]:
        for path in self._root.iterdir():
            if _decode_name(path.name, LAYOUT_BYTES) is not None and path.is_dir():
                yield path

    def _list_blocks(self) -> Iterator[tuple[BlockKey, tuple[float, int]]]:
        """Yield (block, (last use, size)) of every file that is named like a block. Delete
        abandoned partial files."""
        for directory in self._directories():
            layout = bytes.fromhex(directory.name)
            for entry in os.scandir(directory):
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another server has removed it
                content = _decode_name(entry.name, HASH_BYTES)
                if content is not None and stat.S_ISREG(info.st_mode):
                    yield BlockKey(layout, content), (info.st_mtime, info.st_size)
                elif entry.name.endswith(".part") and time.time() - info.st_mtime > ABANDONED_S:
                    Path(entry.path).unlink(missing_ok=True)

    def _path(self, key: BlockKey) -> Path:
        return self._root / key.layout.hex() / key.content.hex()

    def _unlink(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def _forget(self, key: BlockKey) -> None:
        with self._lock:
            self._index.remove(key)


def _move(
    move: Callable[[int, list[Any]], int], file: int, header: Buffer, payload: Payload
) -> int:
    """Read or write a header and a payload with `move`, which is os.readv or os.writev. Return the
    number of bytes until the first call that moved less than it should."""
    moved, parts = 0, [header, *payload]
    for start in range(0, len(parts), MAX_PARTS):
        some = parts[start : start + MAX_PARTS]
        count = move(file, some)
        moved += count
        if count != sum(map(len, some)):
            break
    return moved


def _decode_name(name: str, num_bytes: int) -> bytes | None:
    """Return the `num_bytes` bytes that a file name encodes in lower-case hex digits; None for any
    other name."""
    if len(name) != 2 * num_bytes or not set(name) <= set("0123456789abcdef"):
        return None
    return bytes.fromhex(name)
