"""Index of the open requests: by client and number, by label, and counted by account.

Several requests may have the same label; an abort by label then ends all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from engine_core.requests.request import Request
from protocol.shared.request_ids import begins

MAX_DIGITS = 20
"""A request number has at most this many digits."""
_HEX = re.compile(r"([0-9a-f]{2})+")


class OpenRequests:
    """The requests that have not ended, indexed by client and number and by label."""

    def __init__(self) -> None:
        self._by_number: dict[tuple[bytes, int], Request] = {}
        self._by_label: dict[str, dict[Request, None]] = {}  # in order of arrival
        self._by_account: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_number.values())

    def add(self, request: Request) -> None:
        """Add a request. Adding it again changes nothing."""
        if request.account is not None and (request.client, request.number) not in self._by_number:
            self._by_account[request.account.name] += 1
        self._by_number[request.client, request.number] = request
        for label in request.labels:
            self._by_label.setdefault(label, {})[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not open."""
        del self._by_number[request.client, request.number]
        if request.account is not None:
            self._by_account[request.account.name] -= 1
            if not self._by_account[request.account.name]:
                del self._by_account[request.account.name]
        for label in request.labels:
            labelled = self._by_label[label]
            del labelled[request]
            if not labelled:
                del self._by_label[label]

    def find(self, client: bytes, number: int) -> Request | None:
        return self._by_number.get((client, number))

    def from_client(self, client: bytes) -> list[Request]:
        """Return the open requests of `client`."""
        return [request for request in self if request.client == client]

    def find_by_name(self, name: str) -> list[Request]:
        """Return the requests with the label `name`. If there are none, return the request without
        labels whose `Request.name` is `name`."""
        if name in self._by_label:
            return list(self._by_label[name])
        client, _, number = name.partition(".")
        if not (_HEX.fullmatch(client) and number.isascii() and number.isdecimal()):
            return []
        found = self.find(bytes.fromhex(client), int(number[:MAX_DIGITS]))
        return [] if found is None or found.labels else [found]

    def find_by_beginning(self, text: str) -> list[Request]:
        """Return the requests one of whose names begins with `text`."""
        return [
            request
            for request in self
            if any(begins(name, text) for name in request.labels or (request.name,))
        ]

    def num_for_account(self, account: str) -> int:
        return self._by_account[account]

    @property
    def labels(self) -> set[str]:
        return set(self._by_label)
