"""One server per port: the lock in the run directory, and who holds a port that is not ours.

The lock is a file that the kernel lets one process lock (flock). The children inherit the locked
descriptor, so the directory stays taken until the last of them is gone, even if we are killed: a
new server cannot bind its sockets where an old engine is about to clear up. Its text is the pid of
the server, and a line of JSON (`LockFacts`).
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
"""The key of `--split`, new with each run."""
CARD_FILE = "model.card"
METRICS = "metrics"
"""A folder in which several gateway processes count together."""
ATTEMPTS, ATTEMPT_EVERY_S = 25, 0.02
LISTENING = "0A"  # the state column of /proc/net/tcp


class LockFacts(msgspec.Struct, frozen=True):
    """What a server says of itself beside its pid; each is "" until it is known."""

    url: str = ""
    model: str = ""


PORT_TAKEN = ("a server already runs on port {}", "--port")


@contextlib.contextmanager
def holding(directory: Path, taken: tuple[str, str] = PORT_TAKEN) -> Iterator[int]:
    """Hold the directory for a whole run, as `hold`. Remove the files of killed servers before, and
    those of this one after.

    After an unexpected exception the files are left alone: children may still use them.
    """
    sweep(directory.parent)
    lock = hold(directory, taken)
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


def hold(directory: Path, taken: tuple[str, str] = PORT_TAKEN) -> int:
    """Make `directory` private and ours until the returned descriptor is closed. Raises Failure.

    taken   what to say where it is another's, around the directory's name; what to choose instead
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
        time.sleep(ATTEMPT_EVERY_S)  # tools lock it for a moment, too
    raise Failure(_taken(directory, *taken), exit_code=ExitCode.IN_USE)


def _try_lock(directory: Path, flags: int = 0) -> int | None:
    """Return the locked file of `directory`; None if another process has locked it, or it was
    removed meanwhile: its lock would be nobody's. Raises OSError."""
    path = directory / LOCK
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    os.close(lock)
    return None


def clear(directory: Path) -> list[str]:
    """Remove what a server makes in its directory; the names. For the holder of its lock."""
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
    """As `clear`; the directory and its lock go, too, unless there is something else in it."""
    removed = clear(directory)
    (directory / LOCK).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        directory.rmdir()
    return removed


def sweep(base: Path) -> None:
    """Dissolve the run directories in `base` that no process holds: their servers were killed."""
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
    """Return what the holder of `directory` said last; nothing if it said nothing."""
    try:
        said = (directory / LOCK).read_text().split("\n")[1]
        return msgspec.json.decode(said, type=LockFacts)
    except (OSError, LookupError, msgspec.DecodeError):
        return LockFacts()


def holder(directory: Path) -> int | None:
    """The pid of the server that holds `directory`; None if nobody does. May be gone already."""
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
    """Raises Failure, naming the holder's pid where the system lets us see it."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            words = (
                f"cannot listen on {host}:{port}: {error.strerror}; choose with --host and --port"
            )
            raise Failure(words, exit_code=ExitCode.IN_USE) from None
        who = _listener(port)
        raise Failure(
            f"port {port} is in use by {who or 'another program'}; choose another with --port",
            exit_code=ExitCode.IN_USE,
        ) from None


def _taken(directory: Path, what: str, option: str) -> str:
    pid, words = holder(directory), what.format(directory.name)
    if pid is not None and not Path(f"/proc/{pid}").exists():
        return f"{words}: process {pid} is gone, but its children still stop; wait"
    whose = f"process {pid}" if pid is not None else "another process"
    return f"{words}: {whose}; choose another with {option}"


def _listener(port: int) -> str | None:
    """ "pid 12 (name)" of the process that listens on `port`, if it is one of ours."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) in wanted:
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
