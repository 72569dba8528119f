"""The output of a batch run: a JSONL file to which results are appended, and its state file.

Rules:

- A lock on the output keeps a second run away. The kernel releases it however the process ends.
- The state file, OUT.state, is written before the first result. It has the digest of the input, so
  results of one input never continue those of another.
- A result is appended with one write. The file is synced to disk every SYNC_S seconds and at the
  end. After a crash of the machine, the results of the last SYNC_S seconds may be lost or torn.
- Unreadable bytes after the last readable result are cut off when a run continues, and their lines
  are sent again. Anything else that is not a result of the input is refused, because then somebody
  else has written to the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Self

import msgspec

from protocol.process.exit_codes import ExitCode
from protocol.shared.batches import BadLine, BatchResult, digest_of_id, read_result
from tools.batches.input import InputFacts
from tools.failure import Failure

STATE_SUFFIX = ".state"
STATE_VERSION = 1
SYNC_S = 1.0
READ_BYTES = 1 << 20


class OutputState(msgspec.Struct, frozen=True):
    """The content of a state file."""

    version: int
    #: SHA-256 of the input.
    input_digest: str
    num_lines: int


class BatchOutput:
    """The open, locked output file. Use it in a `with` block. Many threads may call `append`.

    Raises Failure if the file cannot be opened, or if another run holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state_path = path.with_name(path.name + STATE_SUFFIX)
        #: Number of results in the file, and how many of them have failed.
        self.num_done = self.num_failed = 0
        self._lock = threading.Lock()
        self._synced_at = time.monotonic()
        self._is_closed = False
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._unusable(error) from None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, self._fd)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise Failure(f"{path} is not a regular file", exit_code=ExitCode.USAGE)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Failure(f"another run writes to {path}", exit_code=ExitCode.USAGE) from None
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def resume(self, facts: InputFacts) -> Set[bytes]:
        """Return the digests of the ids that have results already. Call this before `append`.

        Raises Failure if the output does not belong to the input.
        """
        state = self._read_state()
        if state is None and os.fstat(self._fd).st_size:
            raise Failure(
                f"{self._path} exists and is not an output of run-batch ({self._state_path.name} "
                "is missing); choose another output",
                exit_code=ExitCode.USAGE,
            )
        if state is None:
            self._write_state(OutputState(STATE_VERSION, facts.digest, facts.num_lines))
        elif state.input_digest != facts.digest:
            raise Failure(
                f"the input has changed since {self._path} was started; choose another output, or "
                f"remove it and {self._state_path.name} to start again",
                exit_code=ExitCode.USAGE,
            )
        return self._read_done(facts)

    def append(self, result: BatchResult) -> None:
        """Append a result. Does nothing after `close`. Raises Failure if the disk is full."""
        data = result.to_line()
        with self._lock:
            if self._is_closed:
                return
            try:
                self._write(data)
                if time.monotonic() - self._synced_at >= SYNC_S:
                    os.fsync(self._fd)
                    self._synced_at = time.monotonic()
            except OSError as error:
                raise self._unusable(error) from None
            self._count(result)

    def close(self) -> None:
        """Sync and close the file. A result that is being appended is written first. Raises Failure
        if the file cannot be synced."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                try:
                    os.fsync(self._fd)
                except OSError as error:
                    raise self._unusable(error) from None
                finally:
                    os.close(self._fd)

    def _write(self, data: bytes) -> None:
        """Write all of `data`. If only a part could be written, remove the part."""
        size = os.fstat(self._fd).st_size
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.ftruncate, self._fd, size)
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]
            on_failure.pop_all()

    def _count(self, result: BatchResult) -> None:
        self.num_done += 1
        self.num_failed += result.has_failed

    def _read_done(self, facts: InputFacts) -> Set[bytes]:
        """Read the results in the file, and cut off a torn end. Return the digests of their ids."""
        done: set[bytes] = set()
        torn: tuple[int, int] | None = None  # number and offset of the first unreadable line
        for number, start, data in self._numbered():
            try:
                result = read_result(data)
            except BadLine:
                torn = torn or (number, start)
                continue
            own = digest_of_id(result.custom_id)
            if torn is not None:
                raise self._foreign(torn[0], "is not a result, but results follow it")
            if own not in facts.ids:
                raise self._foreign(number, "has an id that the input does not have")
            if own in done:
                raise self._foreign(number, "repeats the id of an earlier result")
            done.add(own)
            self._count(result)
        if torn is not None:
            os.ftruncate(self._fd, torn[1])
            os.fsync(self._fd)
        return done

    def _numbered(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (number, offset, line) of each line in the file. A last line without a line break
        is yielded as an empty one, because it may be cut anywhere."""
        number, offset, held, position = 1, 0, b"", 0
        while piece := os.pread(self._fd, READ_BYTES, position):
            position += len(piece)
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                yield number, offset, line
                number, offset = number + 1, offset + len(line) + 1
        if held:
            yield number, offset, b""

    def _foreign(self, number: int, problem: str) -> Failure:
        return Failure(
            f"{self._path} was changed by something else: line {number} {problem}",
            exit_code=ExitCode.USAGE,
        )

    def _read_state(self) -> OutputState | None:
        """Return the content of the state file; None if there is no such file."""
        try:
            return msgspec.json.decode(self._state_path.read_bytes(), type=OutputState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise Failure(f"cannot read {self._state_path}: {error}") from None

    def _write_state(self, state: OutputState) -> None:
        """Write the state file in one step: after a crash it is complete or absent."""
        draft = self._state_path.with_name(self._state_path.name + ".new")
        try:
            with draft.open("wb") as file:
                file.write(msgspec.json.encode(state) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._state_path)
            directory = os.open(self._state_path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise Failure(f"cannot write {self._state_path}: {error.strerror}") from None

    def _unusable(self, error: OSError) -> Failure:
        return Failure(f"cannot write {self._path}: {error.strerror}")
