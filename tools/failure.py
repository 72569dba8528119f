"""What a person at the terminal can do something about."""

from __future__ import annotations

from protocol.exit_codes import ExitCode


class Failure(Exception):
    """Shown as one line, without a traceback; the command ends with `exit_code` (`ExitCode`)."""

    def __init__(self, message: str, *, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
