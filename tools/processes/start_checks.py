"""Checks of a command that starts processes: libraries, the cluster key, a directory. Each raises
Failure, before anything is started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from protocol.cluster_key import read_cluster_key
from protocol.exit_codes import ExitCode
from tools.failure import Failure

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
            raise Failure(f"{library} is not installed; try: pip install 'tidegate[{extra}]'")


def check_key(path: str) -> None:
    """Raise Failure if the cluster key at `path` cannot be used."""
    try:
        read_cluster_key(path)
    except ValueError as error:
        raise Failure(str(error), exit_code=ExitCode.USAGE) from None


def check_kv_disk(path: str) -> None:
    """Create the directory for K/V on disk, if `path` is not "". Raises Failure if that is not
    possible, or if the directory is not writable."""
    try:
        if path:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        message = f"--kv-disk {path}: cannot create this directory: {error.strerror}"
        raise Failure(message, exit_code=ExitCode.USAGE) from None
    if path and not os.access(path, os.W_OK | os.X_OK):
        raise Failure(f"--kv-disk {path}: not writable", exit_code=ExitCode.USAGE)
