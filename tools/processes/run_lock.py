"""The lock of a run directory, which allows one server per port, and the check of the HTTP port.

The lock is a file that is locked with flock. The children inherit the locked descriptor, so the
directory stays locked until the last of them is gone, even if the supervisor was killed. Otherwise
an old engine that cleans up could remove the sockets of a new server. The file contains the pid of
the supervisor and a line of JSON (`LockFacts`).
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

from protocol.exit_codes import ExitCode
from protocol.sockets import make_private
from tools.failure import Failure

LOCK = "pid"
RUN_KEY = "cluster.key"
"""The cluster key of `--split`, new in each run."""
CARD_FILE = "model.card"
METRICS = "metrics"
"""The directory in which several gateway processes share their metrics."""
ATTEMPTS, ATTEMPT_EVERY_S = 25, 0.02
LISTENING = "0A"  # the state column of /proc/net/tcp


class LockFacts(msgspec.Struct, frozen=True):
    """What a server writes into its lock in addition to its pid; "" until it is known."""

    url: str = ""
    model: str = ""


PORT_IN_USE = ("a server already runs on port {}", "--port")


@contextlib.contextmanager
def holding(directory: Path, in_use: tuple[str, str] = PORT_IN_USE) -> Iterator[int]:
    """Hold the directory inside the `with` block; see `hold`.

    The files of killed servers are removed before, and the files of this server after. An
    unexpected exception leaves the files alone, because children may still use them.
    """
    sweep(directory.parent)
    lock = hold(directory, in_use)
    try:
        clear(directory)
        yield lock
    except (Failure, KeyboardInterrupt):  # before any child was started
        dissolve(directory)
        raise
    else:
        dissolve(directory)
    finally:
        os.close(lock)


def hold(directory: Path, in_use: tuple[str, str] = PORT_IN_USE) -> int:
    """Make `directory` private, and lock it until the returned descriptor is closed.

    Raises Failure if another process holds it.

    in_use   for the error message: a format with the directory's name; the option to change
    """
    for _ in range(ATTEMPTS):
        try:
            make_private(directory)
            lock = _try_lock(directory, os.O_CREAT)
        except FileNotFoundError:  # its last holder removed it just now
            lock = None
        except OSError as error:
            raise Failure(f"no run directory: {error}") from None
        if lock is not None:
            os.ftruncate(lock, 0)
            describe(lock, LockFacts())
            return lock
        time.sleep(ATTEMPT_EVERY_S)  # a tool may hold it for a moment
    raise Failure(_in_use_message(directory, *in_use), exit_code=ExitCode.IN_USE)


def _try_lock(directory: Path, flags: int = 0) -> int | None:
    """Return the descriptor of the locked file in `directory`. Raises OSError.

    Returns None if another process has locked it, or if the file was removed meanwhile.
    """
    path = directory / LOCK
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    os.close(lock)
    return None


def clear(directory: Path) -> list[str]:
    """Remove the files of a server from a directory that we hold. Returns their names."""
    removed = []
    for path in sorted(directory.iterdir()):
        if path.name == METRICS and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_socket() or path.name in (RUN_KEY, CARD_FILE):
            path.unlink(missing_ok=True)
        else:
            continue
        removed.append(path.name)
    return removed


def dissolve(directory: Path) -> list[str]:
    """Call `clear`, then remove the lock, and the directory if it is empty."""
    removed = clear(directory)
    (directory / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()
    return removed


def sweep(base: Path) -> None:
    """Remove the run directories in `base` that no process holds: their servers were killed."""
    for directory in [lock.parent for lock in base.glob(f"*/{LOCK}")]:
        with contextlib.suppress(OSError):
            lock = _try_lock(directory)
            if lock is not None:
                dissolve(directory)
                os.close(lock)


def describe(lock: int, facts: LockFacts) -> None:
    """Write the holder's pid and `facts` into the lock, for other tools of this user."""
    text = b"%d\n%s\n" % (os.getpid(), msgspec.json.encode(facts))
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))


def facts(directory: Path) -> LockFacts:
    """Return the facts in the lock of `directory`, or empty ones if there are none."""
    try:
        line = (directory / LOCK).read_text().split("\n")[1]
        return msgspec.json.decode(line, type=LockFacts)
    except (OSError, LookupError, msgspec.DecodeError):
        return LockFacts()


def holder(directory: Path) -> int | None:
    """Return the pid of the supervisor that holds `directory`, which may have exited, or None."""
    try:
        with (directory / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError):
            return int((directory / LOCK).read_text().partition("\n")[0])
    except OSError:
        pass
    return None


def check_port_is_free(host: str, port: int) -> None:
    """Raise Failure if the port is in use, with the pid that uses it if that is visible to us."""
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
    """Return "pid 12 (name)" of the process that listens on `port`, if this user owns it."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in sockets:
                process = descriptor.parents[1]
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def _listening_inodes(port: int) -> list[str]:
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                columns = row.split()
                if columns[3] == LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                    inodes.append(columns[9])
    return inodes
