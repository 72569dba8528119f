"""Results of encoding that are computed and not sent yet, because their clients must read first.

A result can be 32 MiB, and a client with too many unread bytes is dropped
(connections/clients.py). So a result is sent only while its client has few unread bytes. Until then
its request waits here. It is still open, so it can be aborted, it keeps a draining engine alive,
and it can miss its deadline.

What waits is bounded, because requests whose results could not be sent are not started:

- While a client has unsent results, none of its requests is started. Other clients are not
  affected.
- No request starts while the unsent results are more than MAX_UNSENT_BYTES together. The loop then
  drops clients that do not read (result_sender.py).

Requests that were started before are computed to their end. They are few (scheduler.py:
MAX_STARTED).
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from itertools import chain, islice

from engine_core.requests.request import Request
from protocol.engine.encoding import MAX_STEP_INPUTS

MAX_UNSENT_BYTES = 256 << 20
"""While more bytes are unsent, no request that encodes is started."""


class UnsentResults:
    """The requests whose results are computed and not sent, in the order of their ends."""

    def __init__(self) -> None:
        #: Bytes of all unsent results.
        self.num_bytes = 0
        self._by_client: dict[bytes, dict[Request, None]] = {}

    def __len__(self) -> int:
        """Return the number of requests."""
        return sum(map(len, self._by_client.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._by_client.values())

    def __contains__(self, request: Request) -> bool:
        return request in self._by_client.get(request.client, ())

    @property
    def clients(self) -> KeysView[bytes]:
        """The clients that have unsent results."""
        return self._by_client.keys()

    @property
    def are_too_many(self) -> bool:
        """Whether no request that encodes may start."""
        return self.num_bytes > MAX_UNSENT_BYTES

    def add(self, request: Request) -> None:
        self._by_client.setdefault(request.client, {})[request] = None
        self.num_bytes += _num_bytes(request)

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it has no unsent result."""
        requests = self._by_client[request.client]
        del requests[request]
        self.num_bytes -= _num_bytes(request)
        if not requests:
            del self._by_client[request.client]

    def first(self, client: bytes, num_bytes: int) -> list[Request]:
        """Return the first requests of a client that has unsent results: those whose results have
        at most `num_bytes` together, and at least one. One message has room for the results of
        MAX_STEP_INPUTS requests (protocol/wire/codec.py)."""
        found: list[Request] = []
        for request in islice(self._by_client[client], MAX_STEP_INPUTS):
            num_bytes -= _num_bytes(request)
            if found and num_bytes < 0:
                break
            found.append(request)
        return found

    def fits(self, client: bytes, num_bytes: int) -> bool:
        """Return whether the first unsent result of a client has at most `num_bytes`."""
        return _num_bytes(next(iter(self._by_client[client]))) <= num_bytes


def _num_bytes(request: Request) -> int:
    assert request.encode is not None
    return request.encode.num_result_bytes
