"""The lock of a run directory, which allows one server per port, and the check of the HTTP port.

A server locks a file in its run directory with flock. Its child processes inherit the locked
descriptor, so the directory stays locked until the last of them has ended, even if the supervisor
was killed. Otherwise an old engine could remove the sockets of a new server when it ends. The file
contains the pid of the supervisor and a line of JSON (`LockFacts`).

A base directory contains the run directories of a user. It may lie in /tmp, where another user can
create it first, with links to any place. So a base is listed, and a lock is opened, only after the
base and the run directory were found to be private. Files are removed only under the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protocol.process.exit_codes import ExitCode
from protocol.wire.sockets import (
    ADAPTERS_SUFFIX,
    MEETING_FILE,
    check_private,
    make_private,
    runtime_setting,
)
from tools.failure import Failure
from tools.processes.server_log import LOG_FILE, OLD_LOG_FILE

LOCK = "pid"
RUN_KEY = "cluster.key"
"""File with the cluster key of a server with --split or --cluster that makes its own key, a new one
in each run."""
ENGINES_FILE = "engines"
"""File with the addresses of the engines that --cluster has placed."""
CARD_SUFFIX = ".card"
CARD_FILE = "model" + CARD_SUFFIX
METRICS = "metrics"
"""Directory in which the gateway processes of a server combine their metrics."""
ATTEMPTS, ATTEMPT_EVERY_S = 25, 0.02
"""How often `hold` tries to get the lock, and the pause between two attempts."""
LISTENING = "0A"  # the state column of /proc/net/tcp


class LockFacts(msgspec.Struct, frozen=True):
    """The facts that a server writes into its lock, in addition to its pid; "" if unknown. Several
    models are separated by commas."""

    url: str = ""
    model: str = ""


PORT_IN_USE = ("a server already runs on port {}", "--port")
"""The argument `in_use` of `hold` for servers."""


@contextlib.contextmanager
def holding(directory: Path, in_use: tuple[str, str] = PORT_IN_USE) -> Iterator[int]:
    """Hold a run directory inside the `with` block, as `hold` does. Yield the lock's descriptor.

    The directories of killed servers are removed before the block. `directory` is removed after it,
    except after an unexpected exception, because child processes may still use its files.
    """
    remove_stale(directory.parent)
    lock = hold(directory, in_use)
    try:
        clear(directory)
        yield lock
    except (Failure, KeyboardInterrupt):  # no child runs yet, or only until this process has ended
        remove(directory)
        raise
    else:
        remove(directory)
    finally:
        os.close(lock)


def hold(directory: Path, in_use: tuple[str, str] = PORT_IN_USE) -> int:
    """Create a run directory if necessary, and lock it until the returned descriptor is closed.

    in_use   for the error message: a text with {} for the directory's name, and the option with
             which the user can choose another directory

    Raises Failure if another process holds the directory, or if the directory cannot be used.
    """
    removed: FileNotFoundError | None = None
    for _ in range(ATTEMPTS):
        try:
            make_private(directory)
            lock = _try_lock(directory, os.O_CREAT)
            removed = None
        except FileNotFoundError as error:
            # Another process has just removed the directory, or it cannot be created.
            lock, removed = None, error
        except OSError as error:
            raise _unusable(directory, error) from None
        if lock is not None:
            os.ftruncate(lock, 0)
            describe(lock, LockFacts())
            return lock
        time.sleep(ATTEMPT_EVERY_S)  # another command may hold the lock for a moment
    if removed is not None:
        raise _unusable(directory, removed)
    raise Failure(_in_use_message(directory, *in_use), exit_code=ExitCode.IN_USE)


def _unusable(directory: Path, error: OSError) -> Failure:
    """Return the failure of a run directory that cannot be used. It names the variable."""
    text = f"cannot use the run directory {directory}: {error.strerror or error}"
    return Failure(": ".join(filter(None, (runtime_setting(), text))))


def _try_lock(directory: Path, flags: int = 0) -> int | None:
    """Lock the lock file in `directory`, and return its descriptor.

    flags   additional flags of `os.open`

    Return None if another process has locked the file, or if it was removed meanwhile. Raises
    OSError as `_open` does.
    """
    lock = _open(directory, flags)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (directory / LOCK).stat()):
            return lock
    os.close(lock)
    return None


def _open(directory: Path, flags: int = 0) -> int:
    """Open the lock file in `directory`, and return its descriptor. Raises OSError if it cannot be
    opened, and PermissionError if the directory or its base is not private."""
    check_private(directory.parent)
    check_private(directory)
    return os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)


def clear(directory: Path) -> list[str]:
    """Remove a server's files, except the lock, from a run directory that this process holds.
    Return the names of the removed files."""
    removed = []
    for path in sorted(directory.iterdir()):
        if path.name == METRICS and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif (
            path.is_socket()
            or path.name in (RUN_KEY, LOG_FILE, OLD_LOG_FILE)
            or path.suffix in (CARD_SUFFIX, ADAPTERS_SUFFIX)
            or path.name.startswith(MEETING_FILE)
            or path.stem == ENGINES_FILE
        ):
            path.unlink(missing_ok=True)
        else:
            continue
        removed.append(path.name)
    return removed


def remove(directory: Path) -> list[str]:
    """Remove a run directory that this process holds. Keep it if it has unknown files. Return the
    names of the removed files, without the lock."""
    removed = clear(directory)
    (directory / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()
    return removed


def run_directories(base: Path) -> list[Path]:
    """Return the run directories in `base`, sorted by name. Links are skipped. Return none if the
    base does not exist or is not private."""
    try:
        check_private(base)
        found = sorted(base.iterdir())
    except OSError:
        return []
    return [each for each in found if not each.is_symlink() and (each / LOCK).is_file()]


def remove_stale(base: Path) -> None:
    """Remove the run directories in `base` that no process holds: those of killed servers."""
    for directory in run_directories(base):
        with contextlib.suppress(OSError):
            lock = _try_lock(directory)
            if lock is not None:
                remove(directory)
                os.close(lock)


def describe(lock: int, facts: LockFacts) -> None:
    """Write this process's pid and `facts` into the lock, for other commands of this user."""
    text = b"%d\n%s\n" % (os.getpid(), msgspec.json.encode(facts))
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))


def facts(directory: Path) -> LockFacts:
    """Return the facts in the lock of `directory`; empty ones if it has none."""
    try:
        with open(_open(directory), "rb") as lock:
            return msgspec.json.decode(lock.read().split(b"\n")[1], type=LockFacts)
    except (OSError, LookupError, msgspec.DecodeError):
        return LockFacts()


def holder(directory: Path) -> int | None:
    """Return the pid of the supervisor of the server that holds `directory`; None if no process
    holds it. The supervisor may have ended while its child processes still hold the directory."""
    with contextlib.suppress(OSError, ValueError), open(_open(directory), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.readline())
    return None


def check_port_is_free(host: str, port: int) -> None:
    """Raise Failure if no server can listen on `host` and `port`. If another process of this user
    listens there, the message contains its pid."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            message = (
                f"cannot listen on {host}:{port}: {error.strerror}; choose another address with "
                "--host and --port"
            )
            raise Failure(message, exit_code=ExitCode.IN_USE) from None
        user = _listener(port)
        raise Failure(
            f"port {port} is in use by {user or 'another program'}; choose another with --port",
            exit_code=ExitCode.IN_USE,
        ) from None


def _in_use_message(directory: Path, template: str, option: str) -> str:
    pid, text = holder(directory), template.format(directory.name)
    if pid is not None and not Path(f"/proc/{pid}").exists():
        return f"{text}: process {pid} is gone, but its children are still stopping; try again soon"
    user = f"process {pid}" if pid is not None else "another process"
    return f"{text}: {user}; choose another with {option}"


def _listener(port: int) -> str | None:
    """Return "pid 12 (name)" of the process that listens on `port`; None if it is not visible."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in sockets:
                process = descriptor.parents[1]
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def _listening_inodes(port: int) -> list[str]:
    """Return the inodes of the TCP sockets that listen on `port`."""
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                    inodes.append(columns[9])
    return inodes
