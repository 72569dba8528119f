"""The exception for failures that the user can act on."""

from __future__ import annotations

from protocol.exit_codes import ExitCode


class Failure(Exception):
    """Printed as one line without a traceback. The command ends with `exit_code` (`ExitCode`)."""

    def __init__(self, message: str, *, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
