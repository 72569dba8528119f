"""`from protocol.offline import LLM`: the public name of sdk/offline.py."""

from protocol.sdk.offline import LLM, OfflineResult

__all__ = ["LLM", "OfflineResult"]
