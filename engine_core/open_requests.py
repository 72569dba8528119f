"""The requests that have not ended: found by their client's number, or by a label.

A label need not be unique: whatever has it, is meant. Each lookup is one step, however many are
open.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine_core.request import Request


class OpenRequests:
    def __init__(self) -> None:
        self._by_number: dict[tuple[bytes, int], Request] = {}
        self._by_label: dict[str, dict[Request, None]] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_number.values())

    def add(self, request: Request) -> None:
        """A request that is here already stays as it is."""
        self._by_number[request.client, request.number] = request
        for label in request.labels:
            self._by_label.setdefault(label, {})[request] = None

    def remove(self, request: Request) -> None:
        """Raises KeyError where it is not here."""
        del self._by_number[request.client, request.number]
        for label in request.labels:
            having = self._by_label[label]
            del having[request]
            if not having:
                del self._by_label[label]

    def find(self, client: bytes, number: int) -> Request | None:
        return self._by_number.get((client, number))

    def of(self, client: bytes) -> list[Request]:
        return [request for request in self if request.client == client]

    def labelled(self, label: str) -> list[Request]:
        return list(self._by_label.get(label, ()))

    @property
    def labels(self) -> set[str]:
        return set(self._by_label)
