"""The ways in which a model cannot be loaded."""

from __future__ import annotations

from protocol.errors import EngineError

FETCH_AGAIN = "fetch the model's files again"
REMEDY = "use another model, or correct its files"
"""For an error that has no remedy of its own."""


class UnusableModel(EngineError):
    """Files missing, damaged, or asking for something not supported; the message says which, and
    `remedy` what to do about it, if that does not go without saying."""

    code = "unusable_model"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class NotEnoughMemory(UnusableModel):
    """Another machine, or other options, could hold it; the message has the numbers."""

    code = "not_enough_memory"
