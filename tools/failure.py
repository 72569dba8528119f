"""The exception for failures that the user can act on."""

from __future__ import annotations

from protocol.process.exit_codes import ExitCode


class Failure(Exception):
    """A failure that the user can act on. The command prints it as one line, without a traceback.

    exit_code   the exit code of the command (`ExitCode`)
    """

    def __init__(self, message: str, *, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
