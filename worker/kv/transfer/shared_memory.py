"""Memory of one process that others of the same user, on the same host, can map and only read.

It is an anonymous file (memfd): no name that could be left behind, no limit as of /dev/shm; the
system gives it back when the last process that has it open has ended. Pages are zero, and cost
nothing until they are touched. Others open it as `/proc/PID/fd/N`, which the kernel grants to
processes that might as well debug this one. What they find is recognised by its inode: another PID
namespace has another process under that number, and other files.

Sealed, it cannot shrink: who reads a map of a file that was cut off is killed by the kernel. Nor
can anybody map it for writing any more.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.kv_peers import ShmOffer
from worker.kv.movers.base import TransferLost

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since Linux 5.1; Python has no name for it
NAME = "tidegate-kv"


class SharedMemory:
    """So many bytes, zero at first. Others can map them as long as this object lives, and keep what
    they have mapped. Raises OSError."""

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
        """[num_bytes], to be written. It lives as long as somebody holds it."""
        return np.frombuffer(self._map, np.uint8)

    def offer(self, num_blocks: int) -> ShmOffer:
        """What another process must know."""
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
    """The memory behind an offer, to be read. Raises Lost, saying why."""
    if BOOT_ID.read_text().strip() != offer.boot:
        raise TransferLost("it is on another host")
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
            raise TransferLost(f"{offer.path} is another file here")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransferLost(f"{offer.path} may shrink")
        return mmap.mmap(fd, offer.num_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise TransferLost(f"{offer.path}: {error.strerror}") from None
    finally:
        os.close(fd)


def _seal(fd: int) -> None:
    """Against a change of size; and, where the kernel knows how, against writing by others."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
