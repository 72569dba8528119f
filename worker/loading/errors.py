"""Errors of models that cannot be loaded."""

from __future__ import annotations

from protocol.errors import EngineError

FETCH_AGAIN = "fetch the model's files again"
REMEDY = "use another model, or correct its files"
"""The default remedy, for errors without one of their own."""


class UnusableModel(EngineError):
    """Files are missing or damaged, or need something unsupported; the message gives the reason.

    `remedy` is what the user can do, if the reason does not show it.
    """

    code = "unusable_model"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class NotEnoughMemory(UnusableModel):
    """The model does not fit on this machine with these options; the message has the numbers."""

    code = "not_enough_memory"
