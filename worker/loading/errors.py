"""The one way in which model files fail."""

from __future__ import annotations

from protocol.errors import EngineError


class UnusableModel(EngineError):
    """Files missing, damaged, or asking for something not supported; the message says which."""

    code = "unusable_model"
