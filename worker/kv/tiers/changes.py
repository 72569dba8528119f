"""Contents added to and removed from a tier since the last report."""

from __future__ import annotations


class Changes:
    """Only the latest change of each content is kept."""

    def __init__(self) -> None:
        self._is_there: dict[bytes, bool] = {}

    def add(self, content: bytes) -> None:
        self._is_there[content] = True

    def remove(self, content: bytes) -> None:
        self._is_there[content] = False

    def drain(self) -> tuple[list[bytes], list[bytes]]:
        """Return (added, removed) since the last call."""
        changes, self._is_there = self._is_there, {}
        added = [content for content, is_there in changes.items() if is_there]
        return added, [content for content, is_there in changes.items() if not is_there]
