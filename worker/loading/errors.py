"""The ways in which a model cannot be loaded."""

from __future__ import annotations

from protocol.errors import EngineError


class UnusableModel(EngineError):
    """Files missing, damaged, or asking for something not supported; the message says which."""

    code = "unusable_model"


class NotEnoughMemory(UnusableModel):
    """Another machine, or other options, could hold it; the message has the numbers."""

    code = "not_enough_memory"
