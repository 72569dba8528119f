"""Errors of a worker: of models that cannot be loaded, and of lost peers. Needs no torch."""

from __future__ import annotations

from protocol.wire.errors import EngineError

FETCH_AGAIN = "fetch the model's files again"
REMEDY = "use another model, or correct its files"
"""The remedy shown for errors that do not give one."""
MAX_MESSAGE_CHARS = 1200


class UnusableModel(EngineError):
    """The model's files are missing, damaged, or need an unsupported feature.

    The message gives the reason. `remedy` says what the user can do, if the reason does not show
    it.

    The message is one line. Its middle is left out if it is longer than MAX_MESSAGE_CHARS, because
    names and values in it come from files that are not trusted.
    """

    code = "unusable_model"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        line = " ".join(message.splitlines())
        if len(line) > MAX_MESSAGE_CHARS:
            half = MAX_MESSAGE_CHARS // 2
            line = f"{line[:half]} ... {line[-half:]}"
        super().__init__(line)
        self.remedy = remedy


class NotEnoughMemory(UnusableModel):
    """The model does not fit into memory with these options. The message gives the numbers."""

    code = "not_enough_memory"


class PeerLost(Exception):
    """The connection to another rank of a tensor parallel group broke. The cause is in that
    rank."""
