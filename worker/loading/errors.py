"""Errors of models that cannot be loaded."""

from __future__ import annotations

from protocol.errors import EngineError

FETCH_AGAIN = "fetch the model's files again"
REMEDY = "use another model, or correct its files"
"""The remedy shown for errors that do not give one."""


class UnusableModel(EngineError):
    """The model's files are missing, damaged, or need an unsupported feature.

    The message gives the reason. `remedy` says what the user can do, if the reason does not show
    it.
    """

    code = "unusable_model"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class NotEnoughMemory(UnusableModel):
    """The model does not fit into memory with these options. The message gives the numbers."""

    code = "not_enough_memory"
