"""Who computes on which device: a GPU is one worker's, unless all who take it say that they share.

A device has a folder, beside the run directories of this user's servers. `lock` in it is locked by
who has the device: exclusively, or shared with others that share. Each holder has a file of its
own there, locked too, that says who it is. The kernel drops both locks with the process, however it
ends; nobody inherits them. What a killed one has left is cleared by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from protocol.errors import EngineError
from protocol.process_state import is_ending
from protocol.sockets import make_private, run_directory

LOCK = "lock"
WHO = ".holder"
PATIENCE_S = 5.0
"""Whoever has the device and is about to end, or has not said yet who it is, is waited for."""
LOOK_AGAIN_S = 0.05


class DeviceHolder(msgspec.Struct, frozen=True, kw_only=True):
    """place: its run directory's name, which is a server's port; since: seconds since 1970; shares:
    others may have the device, too, if they share it"""

    pid: int
    place: str
    model: str
    since: float
    shares: bool = False

    @property
    def told(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        where = f"on port {self.place}" if self.place.isdigit() else f"as {self.place}"
        shared = ", shared" if self.shares else ""
        return f"pid {self.pid} ({self.model} {where}, since {when} UTC{shared})"


class DeviceTaken(EngineError):
    """The message names who has it, and what can be done."""

    code = "device_in_use"


class Claim:
    """A device that is ours until this is closed, or we end."""

    def __init__(self, lock: int, who: int, name: Path) -> None:
        self._descriptors = (lock, who)
        self._name = name

    def close(self) -> None:
        self._name.unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def directory(base: Path | None = None) -> Path:
    """Of all devices, beside the run directories that lie in `base`; not created."""
    return (base or run_directory(0).parent) / "devices"


def take(base: Path, device: str, holder: DeviceHolder) -> Claim:
    """Raises DeviceTaken; OSError where there can be no such folder. `device`: a name for it that
    all who could take it agree on."""
    folder = base / device
    make_private(base)
    make_private(folder)
    lock = _open(folder / LOCK, os.O_CREAT)
    try:
        _lock(lock, folder, holder)
        _clear(folder)
        return Claim(lock, *_sign(folder, holder))
    except BaseException:
        os.close(lock)
        raise


def holders(folder: Path) -> list[DeviceHolder]:
    """Who has the device of this folder, as they have said; oldest first."""
    found = []
    for path in folder.glob(f"*{WHO}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            descriptor = _open(path)
            try:
                if not _is_free(descriptor, fcntl.LOCK_SH):
                    found.append(
                        msgspec.json.decode(os.pread(descriptor, 1 << 16, 0), type=DeviceHolder)
                    )
            finally:
                os.close(descriptor)
    return sorted(found, key=lambda holder: (holder.since, holder.pid))


def held(base: Path) -> dict[str, list[DeviceHolder]]:
    """Of each device that anybody has."""
    folders = sorted(base.iterdir()) if base.is_dir() else []
    return {folder.name: found for folder in folders if (found := holders(folder))}


def _lock(lock: int, folder: Path, holder: DeviceHolder) -> None:
    until = time.monotonic() + PATIENCE_S
    before: list[DeviceHolder] = []
    while not _is_free(lock, fcntl.LOCK_SH if holder.shares else fcntl.LOCK_EX):
        found = holders(folder)
        stay = [other for other in found if not is_ending(other.pid)]
        if (stay and stay == before) or time.monotonic() > until:  # seen twice: it is no accident
            raise DeviceTaken(_taken(folder.name, stay or found))
        before = stay
        time.sleep(LOOK_AGAIN_S)


def _taken(device: str, found: list[DeviceHolder]) -> str:
    whose = " and ".join(holder.told for holder in found) or "another process"
    are_sharing = bool(found) and all(holder.shares for holder in found)
    share = "share it" if are_sharing else "let both share it"
    return (
        f"device {device} is in use by {whose}; stop that (tidegate ps), take another GPU "
        f"(--device cuda:N), or {share} (--share-device)"
    )


def _sign(folder: Path, holder: DeviceHolder) -> tuple[int, Path]:
    """Say who has it. Somebody may clear the new file away before it is locked: then another."""
    while True:
        path = folder / f"{holder.pid}-{secrets.token_hex(4)}{WHO}"
        descriptor = _open(path, os.O_CREAT | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            os.pwrite(descriptor, msgspec.json.encode(holder), 0)
            return descriptor, path
        os.close(descriptor)


def _clear(folder: Path) -> None:
    """What those have left who are gone."""
    for path in folder.glob(f"*{WHO}"):
        with contextlib.suppress(OSError):
            descriptor = _open(path)
            if _is_free(descriptor, fcntl.LOCK_EX):
                path.unlink()
            os.close(descriptor)


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _is_free(descriptor: int, how: int) -> bool:
    """And locked now."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
