"""What a person at the terminal can do something about."""

from __future__ import annotations


class Failure(Exception):
    """Shown as one line, without a traceback; the command ends with `exit_code`."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
