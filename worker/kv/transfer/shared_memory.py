"""Memory of one process that other processes of the same user on the same host can map read-only.

The memory is an anonymous file (memfd). It has no name that could remain in a directory, is not
limited by the size of /dev/shm, and is freed when the last process that has it open ends. Pages are
zero and cost nothing until they are touched. Other processes open `/proc/PID/fd/N`, which the
kernel allows for processes that may also debug this one. They check the inode, because in another
PID namespace the same PID may belong to another process.

The file is sealed so that it cannot shrink, because the kernel kills a process that reads a mapping
of a truncated file. It is also sealed against new writable mappings.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.worker.kv_peers import ShmOffer
from worker.kv.movers.base import TransferLost

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since Linux 5.1; Python has no name for it
NAME = "tidegate-kv"


class SharedMemory:
    """`num_bytes` of zeroed memory. Other processes can map it until this object is deleted;
    existing mappings remain valid after that. The constructor raises OSError if the memory cannot
    be allocated."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self._fd, 0o600)
        os.ftruncate(self._fd, num_bytes)
        self._map = mmap.mmap(self._fd, num_bytes)
        _seal(self._fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @property
    def content(self) -> NDArray[np.uint8]:
        """Return the writable memory, uint8 [num_bytes]. It remains valid while any array refers to
        it."""
        return np.frombuffer(self._map, np.uint8)

    def offer(self, num_blocks: int) -> ShmOffer:
        """Return the offer by which another process can map the memory, as a cache of `num_blocks`
        blocks."""
        info = os.fstat(self._fd)
        return ShmOffer(
            boot=BOOT_ID.read_text().strip(),
            path=f"/proc/{os.getpid()}/fd/{self._fd}",
            device=info.st_dev,
            inode=info.st_ino,
            num_bytes=self.num_bytes,
            num_blocks=num_blocks,
        )


def map_offered(offer: ShmOffer) -> mmap.mmap:
    """Map offered memory for reading. Raises TransferLost, with the reason, if it cannot be
    mapped."""
    if BOOT_ID.read_text().strip() != offer.boot:
        raise TransferLost("the memory is on another host")
    try:
        fd = os.open(offer.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferLost(f"{offer.path}: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino, info.st_size) != (
            offer.device,
            offer.inode,
            offer.num_bytes,
        ):
            raise TransferLost(f"{offer.path} is a different file in this process")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransferLost(f"{offer.path} is not sealed against shrinking")
        return mmap.mmap(fd, offer.num_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise TransferLost(f"{offer.path}: {error.strerror}") from None
    finally:
        os.close(fd)


def _seal(fd: int) -> None:
    """Seal the file's size. Also forbid new writable mappings, if the kernel can."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
