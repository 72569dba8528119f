"""Device locks: a GPU belongs to one worker, unless all workers on it share it.

Each device has a directory next to the run directories of this user's servers. A process that uses
the device, its holder, locks the file `lock` in that directory: exclusively, or shared with the
other holders if all of them share the device. A holder also writes and locks a second file, which
describes the holder (`DeviceHolder`). The kernel releases both locks when the process ends for any
reason. Child processes do not inherit the locks. The next holder removes the files that a killed
process has left behind.
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

from protocol.process.process_state import is_ending
from protocol.wire.errors import EngineError
from protocol.wire.sockets import make_private, run_directory

LOCK_FILE = "lock"
HOLDER_SUFFIX = ".holder"
WAIT_S = 5.0
"""Time to wait for a holder that is about to end, or that has not written its file yet."""
POLL_S = 0.05


class DeviceHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a device.

    place    name of the run directory: the port of the server, or "engine-" and a hash
    since    when it started to use the device, in seconds since 1970
    shares   whether other processes that share the device may use it at the same time
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
    """The device is in use. The message names its holders and what the user can do."""

    code = "device_in_use"


class DeviceClaim:
    """The right to use a device. It ends when `close` is called or this process ends."""

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
    """Return the directory that contains the directory of each device.

    base   the directory of the run directories; default: this user's
    """
    return (base or run_directory(0).parent) / "devices"


def claim_device(base: Path, device: str, holder: DeviceHolder) -> DeviceClaim:
    """Lock the device named `device` for `holder`. Raises DeviceInUse if other processes use the
    device, OSError if its directory cannot be used."""
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
    """Return the current holders of one device, oldest first. `folder` is the device's
    directory."""
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
    """Return the holders of each device that is in use, by the name of the device.

    base   the directory of all devices
    """
    folders = sorted(base.iterdir()) if base.is_dir() else []
    return {folder.name: found for folder in folders if (found := read_holders(folder))}


def _wait_for_lock(lock: int, folder: Path, holder: DeviceHolder) -> None:
    until = time.monotonic() + WAIT_S
    previous: list[DeviceHolder] = []
    while not _try_lock(lock, fcntl.LOCK_SH if holder.shares else fcntl.LOCK_EX):
        found = read_holders(folder)
        remaining = [other for other in found if not is_ending(other.pid)]
        # The same holders were found twice, so they are not just about to end.
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
    """Write and lock the file that describes `holder`. Return its descriptor and path. If another
    process removes the file before it is locked, write another one."""
    while True:
        path = folder / f"{holder.pid}-{secrets.token_hex(4)}{HOLDER_SUFFIX}"
        descriptor = _open(path, os.O_CREAT | os.O_EXCL)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            os.pwrite(descriptor, msgspec.json.encode(holder), 0)
            return descriptor, path
        os.close(descriptor)


def _remove_stale(folder: Path) -> None:
    """Remove the files in `folder` that describe holders which have ended."""
    for path in folder.glob(f"*{HOLDER_SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = _open(path)
            if _try_lock(descriptor, fcntl.LOCK_EX):
                path.unlink()
            os.close(descriptor)


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _try_lock(descriptor: int, mode: int) -> bool:
    """Lock a file without waiting. Return False if another process has locked it.

    mode   `fcntl.LOCK_SH` or `fcntl.LOCK_EX`
    """
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
