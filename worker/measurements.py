"""Stores measurements in files, so that a worker measures only at its first start on a machine.

A file's name is a hash of everything that its measurement depends on. A file that cannot be read or
does not belong to the measurement is replaced. If several workers measure at the same time, the
first to finish writes the file and all use its content, so that all choose alike.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger(__name__)

T = TypeVar("T")


class StoredMeasurement(msgspec.Struct, frozen=True):
    """Content of a file. `of` lists everything that `value`, a JSON value, depends on."""

    of: list[str]
    value: msgspec.Raw


def stored_or_measured(
    folder: Path | None,
    of: Sequence[str],
    kind: type[T],
    measure: Callable[[], T],
    is_valid: Callable[[T], bool] = lambda value: True,
) -> T:
    """Return the stored measurement; if there is no valid one, measure and store it.

    folder     directory of the files; None: measure, and store nothing
    of         everything that the measurement depends on, beginning with what is measured
    kind       type of the value
    is_valid   returns whether a stored value is complete
    """
    if folder is None:
        return measure()
    path = folder / f"{hashlib.sha256(_joined(of)).hexdigest()[:32]}.json"
    if (found := _read(path, of, kind, is_valid)) is not None:
        return found
    value = measure()
    if _write(path, StoredMeasurement(list(of), msgspec.Raw(msgspec.json.encode(value)))):
        return value
    found = _read(path, of, kind, is_valid)
    return value if found is None else found


def _joined(of: Sequence[str]) -> bytes:
    return "\n".join(of).encode()


def _read(path: Path, of: Sequence[str], kind: type[T], is_valid: Callable[[T], bool]) -> T | None:
    """Return the value of a file, or None if there is none. An invalid file is removed."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=StoredMeasurement)
        value = msgspec.json.decode(stored.value, type=kind)
        if stored.of == list(of) and is_valid(value):
            return value
        reason = "it is incomplete or belongs to another measurement"
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:  # a ValidationError is a DecodeError
        reason = str(error)
    log.warning("cannot use %s, so it is measured again: %s", path, reason)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)
    return None


def _write(path: Path, stored: StoredMeasurement) -> bool:
    """Write the file atomically. Return False if another worker was faster; its file stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(stored))
            os.link(name, path)  # fails if the file exists
        finally:
            os.unlink(name)
    except FileExistsError:
        return False
    except OSError as error:
        log.warning("cannot store a measurement in %s: %s", path.parent, error)
    return True
