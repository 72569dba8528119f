"""What appeared in a tier and disappeared from it, since that was asked last."""

from __future__ import annotations


class Changes:
    """The last word about a content counts: who hears of both in one breath hears how it is now."""

    def __init__(self) -> None:
        self._is_there: dict[bytes, bool] = {}

    def add(self, content: bytes) -> None:
        self._is_there[content] = True

    def remove(self, content: bytes) -> None:
        self._is_there[content] = False

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """(appeared, disappeared)"""
        news, self._is_there = self._is_there, {}
        appeared = [content for content, is_there in news.items() if is_there]
        return appeared, [content for content, is_there in news.items() if not is_there]
