"""Stores measurements in files, so that a worker measures only at its first start on a machine.

A file's name is a hash of everything that its measurement depends on. A file that does not contain
a valid measurement is replaced. If several workers measure at the same time, the first to finish
writes the file and all use its content, so that all choose alike.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

log = logging.getLogger(__name__)

T = TypeVar("T")


class MeasurementFile(msgspec.Struct, frozen=True):
    """Content of a file. `of` lists everything that `value`, a JSON value, depends on."""

    of: list[str]
    value: msgspec.Raw


class Measured(NamedTuple, Generic[T]):
    """A measurement, and whether later starts and other workers will find it."""

    value: T
    is_stored: bool


class _Invalid(Exception):
    """A file that can be read does not contain a valid measurement."""


def stored_or_measured(
    folder: Path | None,
    of: Sequence[str],
    kind: type[T],
    measure: Callable[[], T],
    is_valid: Callable[[T], bool] = lambda value: True,
) -> Measured[T]:
    """Return the stored measurement; if there is no valid one, measure and store it.

    folder     directory of the files; None: measure, and store nothing
    of         everything that the measurement depends on, beginning with what is measured
    kind       type of the value
    is_valid   returns whether a stored value is complete
    """
    if folder is None:
        return Measured(measure(), False)
    path = _path(folder, of)
    is_replaced = False
    try:
        return Measured(_read(path, of, kind, is_valid), True)
    except FileNotFoundError:
        pass
    except _Invalid as error:
        log.warning("%s is measured again, because it is not valid: %s", path, error)
        is_replaced = True
    except OSError as error:
        log.warning("cannot read %s: %s", path, error)
    value = measure()
    try:
        _write(
            path, MeasurementFile(list(of), msgspec.Raw(msgspec.json.encode(value))), is_replaced
        )
        return Measured(_read(path, of, kind, is_valid), True)
    except (OSError, _Invalid) as error:
        log.warning("cannot store a measurement in %s: %s", folder, error)
        return Measured(value, False)


def stored(
    folder: Path | None,
    of: Sequence[str],
    kind: type[T],
    is_valid: Callable[[T], bool] = lambda value: True,
) -> T | None:
    """Return the stored measurement, as `stored_or_measured` would find it; None if there is no
    valid one."""
    if folder is None:
        return None
    try:
        return _read(_path(folder, of), of, kind, is_valid)
    except (OSError, _Invalid):
        return None


def _path(folder: Path, of: Sequence[str]) -> Path:
    return folder / f"{hashlib.sha256(_joined(of)).hexdigest()[:32]}.json"


def _joined(of: Sequence[str]) -> bytes:
    return "\n".join(of).encode()


def _read(path: Path, of: Sequence[str], kind: type[T], is_valid: Callable[[T], bool]) -> T:
    """Return the value of a file. Raises OSError and _Invalid."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=MeasurementFile)
        value = msgspec.json.decode(stored.value, type=kind)
    except msgspec.DecodeError as error:  # a ValidationError is a DecodeError
        raise _Invalid(str(error)) from None
    if stored.of != list(of) or not is_valid(value):
        raise _Invalid("it is incomplete or belongs to another measurement")
    return value


def _write(path: Path, content: MeasurementFile, is_replaced: bool) -> None:
    """Write the file atomically. Keep the file of another worker that was faster, unless
    `is_replaced`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(content))
        if is_replaced:
            os.replace(name, path)
            return
        try:
            os.link(name, path)
        except FileExistsError:
            return
        except OSError:  # the file system has no hard links
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
