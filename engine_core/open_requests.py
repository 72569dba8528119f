"""The requests that have not ended: found by their client's number, or by a label; counted by
account.

A label need not be unique: whatever has it, is meant. Each lookup is one step, however many are
open.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from engine_core.request import Request

MAX_DIGITS = 20
"""A number of a request has no more; what has, is none."""
_HEX = re.compile(r"([0-9a-f]{2})+")


class OpenRequests:
    def __init__(self) -> None:
        self._by_number: dict[tuple[bytes, int], Request] = {}
        self._by_label: dict[str, dict[Request, None]] = {}  # in order of arrival
        self._by_account: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_number.values())

    def add(self, request: Request) -> None:
        """A request that is here already stays as it is."""
        if request.account is not None and (request.client, request.number) not in self._by_number:
            self._by_account[request.account.name] += 1
        self._by_number[request.client, request.number] = request
        for label in request.labels:
            self._by_label.setdefault(label, {})[request] = None

    def remove(self, request: Request) -> None:
        """Raises KeyError where it is not here."""
        del self._by_number[request.client, request.number]
        if request.account is not None:
            self._by_account[request.account.name] -= 1
            if not self._by_account[request.account.name]:
                del self._by_account[request.account.name]
        for label in request.labels:
            having = self._by_label[label]
            del having[request]
            if not having:
                del self._by_label[label]

    def find(self, client: bytes, number: int) -> Request | None:
        return self._by_number.get((client, number))

    def of(self, client: bytes) -> list[Request]:
        return [request for request in self if request.client == client]

    def named(self, name: str) -> list[Request]:
        """Those that have this label, or this name."""
        if name in self._by_label:
            return list(self._by_label[name])
        client, _, number = name.partition(".")
        if not (_HEX.fullmatch(client) and number.isascii() and number.isdecimal()):
            return []
        found = self.find(bytes.fromhex(client), int(number[:MAX_DIGITS]))
        return [] if found is None or found.labels else [found]

    def num_of(self, account: str) -> int:
        return self._by_account[account]

    @property
    def labels(self) -> set[str]:
        return set(self._by_label)
