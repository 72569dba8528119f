"""Device locks: a GPU belongs to one worker, unless all workers on it share it.

Each device has a directory next to the run directories of this user's servers. Its file `lock` is
locked by the holder: exclusively, or shared with others that share the device. Each holder also
has a locked file of its own there, which describes it. The kernel releases both locks when the
process ends, however it ends; children do not inherit them. Files left by a killed process are
removed by the next one.
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

LOCK_FILE = "lock"
HOLDER_SUFFIX = ".holder"
WAIT_S = 5.0
"""Time to wait for a holder that is about to end, or has not written its file yet."""
POLL_S = 0.05


class DeviceHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a device.

    place    name of its run directory: the port of its server, or "engine-" and a hash
    since    seconds since 1970
    shares   whether others may use the device too, if they share it
    """

    pid: int
    place: str
    model: str
    since: float
    shares: bool = False

    @property
    def description(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        where = f"on port {self.place}" if self.place.isdigit() else f"as {self.place}"
        shared = ", shared" if self.shares else ""
        return f"pid {self.pid} ({self.model} {where}, since {when} UTC{shared})"


class DeviceInUse(EngineError):
    """The device is in use. The message names the holders and what to do."""

    code = "device_in_use"


class DeviceClaim:
    """Holds a device until it is closed, or this process ends."""

    def __init__(self, lock: int, holder_file: int, path: Path) -> None:
        self._descriptors = (lock, holder_file)
        self._path = path

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
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
    """Return the directory of all devices, next to the run directories in `base`."""
    return (base or run_directory(0).parent) / "devices"


def claim_device(base: Path, device: str, holder: DeviceHolder) -> DeviceClaim:
    """Lock the device of this name. Raises DeviceInUse, or OSError for an unusable directory."""
    folder = base / device
    make_private(base)
    make_private(folder)
    lock = _open(folder / LOCK_FILE, os.O_CREAT)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, lock)
        _wait_for_lock(lock, folder, holder)
        _remove_stale(folder)
        claim = DeviceClaim(lock, *_write_holder(folder, holder))
        on_failure.pop_all()
        return claim


def read_holders(folder: Path) -> list[DeviceHolder]:
    """Return the current holders of the device with this directory, oldest first."""
    found = []
    for path in folder.glob(f"*{HOLDER_SUFFIX}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            descriptor = _open(path)
            try:
                if not _try_lock(descriptor, fcntl.LOCK_SH):
                    found.append(
                        msgspec.json.decode(os.pread(descriptor, 1 << 16, 0), type=DeviceHolder)
                    )
            finally:
                os.close(descriptor)
    return sorted(found, key=lambda holder: (holder.since, holder.pid))


def holders_by_device(base: Path) -> dict[str, list[DeviceHolder]]:
    """Return the holders of each device in use."""
    folders = sorted(base.iterdir()) if base.is_dir() else []
    return {folder.name: found for folder in folders if (found := read_holders(folder))}


def _wait_for_lock(lock: int, folder: Path, holder: DeviceHolder) -> None:
    until = time.monotonic() + WAIT_S
    previous: list[DeviceHolder] = []
    while not _try_lock(lock, fcntl.LOCK_SH if holder.shares else fcntl.LOCK_EX):
        found = read_holders(folder)
        remaining = [other for other in found if not is_ending(other.pid)]
        # Seen twice, the same holders are not just ending.
        if (remaining and remaining == previous) or time.monotonic() > until:
            raise DeviceInUse(_in_use_message(folder.name, remaining or found))
        previous = remaining
        time.sleep(POLL_S)


def _in_use_message(device: str, found: list[DeviceHolder]) -> str:
    users = " and ".join(holder.description for holder in found) or "another process"
    all_share = bool(found) and all(holder.shares for holder in found)
    share = "share it" if all_share else "let both share it"
    return (
        f"device {device} is in use by {users}; stop it (tidegate ps), use another GPU "
        f"(--device cuda:N), or {share} (--share-device)"
    )


def _write_holder(folder: Path, holder: DeviceHolder) -> tuple[int, Path]:
    """Write and lock the holder's file. Retry if another process removes it before it is locked."""
    while True:
        path = folder / f"{holder.pid}-{secrets.token_hex(4)}{HOLDER_SUFFIX}"
        descriptor = _open(path, os.O_CREAT | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            os.pwrite(descriptor, msgspec.json.encode(holder), 0)
            return descriptor, path
        os.close(descriptor)


def _remove_stale(folder: Path) -> None:
    """Remove the files of processes that have ended."""
    for path in folder.glob(f"*{HOLDER_SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = _open(path)
            if _try_lock(descriptor, fcntl.LOCK_EX):
                path.unlink()
            os.close(descriptor)


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _try_lock(descriptor: int, mode: int) -> bool:
    """Lock the file without waiting. Return False if it is locked by another process."""
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
