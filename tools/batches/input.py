"""The input of a batch run: a JSONL file, which is checked as a whole before the first request."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from protocol.process.exit_codes import ExitCode
from protocol.shared.batches import (
    BadLine,
    BatchLine,
    digest_of_id,
    model_in,
    read_line,
    split_lines,
)
from tools.failure import Failure

READ_BYTES = 1 << 20
MAX_LISTED = 10
"""Maximum number of problems in an error message."""
MAX_MODELS = 16
"""Maximum number of models whose names `InputFacts` keeps."""


class InputFacts(msgspec.Struct, frozen=True):
    """The result of the check of an input."""

    #: SHA-256 of the file.
    digest: str
    num_lines: int
    #: Digests of all ids.
    ids: Set[bytes]
    #: The first models that lines name.
    models: list[str]


class BatchInput:
    """The open input file. Use it in a `with` block. Raises Failure if the file cannot be opened.

    The same open file is read for the check and for the requests. If something writes to it in the
    meantime, `lines` raises Failure.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise Failure(f"cannot read {path}: {error.strerror}", exit_code=2) from None
        if not self._file.seekable():
            self._file.close()
            raise Failure(
                f"{path} is a pipe, but the input is read twice; save it as a file",
                exit_code=ExitCode.USAGE,
            )
        self._version = self._stat()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def check(self) -> InputFacts:
        """Check every line. Raises Failure with the numbers of the first lines that are malformed,
        or whose ids are not unique."""
        digest = hashlib.sha256()
        ids: set[bytes] = set()
        repeated: set[bytes] = set()
        models: dict[str, None] = {}
        problems: list[str] = []
        num_lines = num_bad = 0
        for number, data in self._numbered(digest):
            try:
                line = read_line(data)
            except BadLine as bad:
                num_bad += 1
                if len(problems) < MAX_LISTED:
                    problems.append(f"line {number}: {bad.message}")
                continue
            num_lines += 1
            own = digest_of_id(line.custom_id)
            (repeated if own in ids else ids).add(own)
            if len(models) < MAX_MODELS and (model := model_in(line)) is not None:
                models[model] = None
        if problems:
            raise self._wrong(problems, num_bad)
        if repeated:
            raise self._wrong(self._repetitions(repeated), len(repeated))
        if not num_lines:
            raise Failure(f"{self._path} has no lines", exit_code=ExitCode.USAGE)
        return InputFacts(digest.hexdigest(), num_lines, ids, list(models))

    def lines(self, done: Set[bytes]) -> Iterator[BatchLine]:
        """Yield the lines whose ids are not in `done`, in their order. Raises Failure if the file
        has changed since it was opened."""
        for _, data in self._numbered():
            line = read_line(data)
            if digest_of_id(line.custom_id) not in done:
                yield line
        if self._stat() != self._version:
            raise Failure(f"{self._path} was changed during the run")

    def _numbered(self, digest: hashlib._Hash | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (number, line) of the whole file, and add its bytes to `digest`."""
        self._file.seek(0)

        def pieces() -> Iterator[bytes]:
            while piece := self._file.read(READ_BYTES):
                if digest is not None:
                    digest.update(piece)
                yield piece

        try:
            yield from split_lines(pieces())
        except BadLine as bad:
            raise Failure(f"{self._path}: {bad.message}", exit_code=ExitCode.USAGE) from None
        except OSError as error:
            raise Failure(f"cannot read {self._path}: {error.strerror}") from None

    def _repetitions(self, repeated: Set[bytes]) -> list[str]:
        """Return a message for each of the first ids that several lines have. The file is read
        again for this, because the check does not keep the numbers of lines."""
        places: dict[str, list[int]] = {}
        total: Counter[str] = Counter()
        for number, data in self._numbered():
            custom_id = read_line(data).custom_id
            if digest_of_id(custom_id) not in repeated:
                continue
            if custom_id in places or len(places) < MAX_LISTED:
                total[custom_id] += 1
                if total[custom_id] <= MAX_LISTED:
                    places.setdefault(custom_id, []).append(number)
        return [
            f"lines {', '.join(map(str, numbers))}{', ...' * (total[name] > MAX_LISTED)}: "
            f"the same custom_id {name[:64]!r}"
            for name, numbers in places.items()
        ]

    def _wrong(self, problems: list[str], count: int) -> Failure:
        more = f"\n  ... and {count - len(problems):,} more" if count > len(problems) else ""
        listed = "\n  ".join(problems)
        return Failure(
            f"{self._path} cannot be run; nothing was sent:\n  {listed}{more}",
            exit_code=ExitCode.USAGE,
        )

    def _stat(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns
