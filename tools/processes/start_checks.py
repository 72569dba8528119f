"""Checks of a command that starts processes: libraries, the cluster key, a directory. Each raises
Failure, before anything is started."""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from protocol.config.base import NO_PATH, PathKind
from protocol.process.exit_codes import ExitCode
from protocol.process.installation import install_command
from protocol.wire.cluster_key import read_cluster_key
from tools.failure import Failure
from tools.flags import flags_of

EXTRAS = {
    **{"gunicorn": "gateway", "flask": "gateway", "gevent": "gateway", "torch": "worker"},
    "ray": "cluster",
}
"""Libraries that the child processes need -> the extra that installs them."""


def check_installation(libraries: Iterable[str]) -> None:
    """Raise Failure if one of `libraries` is not installed."""
    for library in libraries:
        extra = EXTRAS[library]
        if importlib.util.find_spec(library) is None:
            raise Failure(f"{library} is not installed; try: {install_command(extra)}")


def check_key(path: str) -> None:
    """Raise Failure if the cluster key at `path` cannot be used."""
    try:
        read_cluster_key(path)
    except ValueError as error:
        raise Failure(str(error), exit_code=ExitCode.USAGE) from None


def check_paths(configs: Iterable[type[msgspec.Struct]], values: Mapping[str, Any]) -> None:
    """Check the paths among the options of these configs. Directories to write are created.

    values   field -> value; None: the option was not given

    Raises Failure for the first path that cannot be used. The message names the option.
    """
    for flag in (flag for config in configs for flag in flags_of(config) if flag.path):
        path = values.get(flag.field)
        if path in (None, "", NO_PATH):
            continue
        try:
            _CHECKS[flag.path](Path(path))
        except OSError as error:
            hint = f"; make it with: {_MAKERS[flag.field]}" if flag.field in _MAKERS else ""
            raise Failure(
                f"{flag.name} {path}: cannot {_VERBS[flag.path]}: {error.strerror}{hint}",
                exit_code=ExitCode.USAGE,
            ) from None


def _make_directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_access(path, os.W_OK | os.X_OK)


def _check_new_file(path: Path) -> None:
    """Check that a file can be made at `path`, or changed if it exists."""
    _make_directory(path.parent)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists():
        _check_access(path, os.R_OK | os.W_OK)


def _check_access(path: Path, mode: int) -> None:
    if not os.access(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


_CHECKS: Mapping[PathKind, Callable[[Path], object]] = {
    "file": lambda path: path.open("rb").close(),
    "directory": os.listdir,
    "new file": _check_new_file,
    "new directory": _make_directory,
}
_VERBS: Mapping[PathKind, str] = {
    "file": "read this file",
    "directory": "read this directory",
    "new file": "write this file",
    "new directory": "create this directory",
}
_MAKERS = {"api_keys": "tidegate keys add FILE NAME", "cluster_key": "tidegate cluster-key FILE"}
"""Field -> the command that makes its file."""
