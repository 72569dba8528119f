"""The one way in which model files fail."""

from __future__ import annotations

from protocol.errors import EngineError


class UnusableModel(EngineError):
    """The files are missing, damaged, or ask for something not supported; the message says which."""

    code = "unusable_model"
