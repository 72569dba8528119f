"""Paths that users write."""

from __future__ import annotations

from pathlib import Path

from protocol.process.exit_codes import ExitCode
from tools.failure import Failure


def user_path(text: str | Path) -> Path:
    """Return a path in which `~` or `~NAME` at the start is that user's home directory. Raises
    Failure if it is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        message = f"{text}: the home directory is not known; write the whole path"
        raise Failure(message, exit_code=ExitCode.USAGE) from None
