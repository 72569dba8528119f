"""The open connections of clients. If there are too many, those that are idle are closed.

Each connection needs a file descriptor and a greenlet, whether it is used or not. A server that has
none left accepts no connection, not even that of a health check.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

FIRST_REQUEST_S = 1.0
"""Time that a new connection has for its first request during a drain."""
NUM_RESERVED = 100
"""Files that a process needs besides its connections."""
NUM_SPARE = 16
"""Connections that may be accepted while idle ones are being closed."""
MAX_CONNECTIONS = 10_000


def connections_within(max_files: int) -> int:
    """Return how many connections a process may accept that may open `max_files` files."""
    return max(2 * NUM_SPARE, min(MAX_CONNECTIONS, max_files - NUM_RESERVED))


class ClientConnections:
    """The connections of a process. At most `max_open` are open: to open another one, the idle
    connection that has been idle for longest is closed. One peer may have half of them, and then
    its own are closed. Connections with a request in progress are never closed."""

    def __init__(self) -> None:
        #: The server that accepts the connections sets this.
        self.max_open = MAX_CONNECTIONS - NUM_SPARE
        #: Idle connection -> (peer, earliest time at which a drain may close it, on
        #: time.monotonic's clock). The first one has been idle for longest.
        self._idle: dict[Any, tuple[str, float]] = {}
        #: Peer -> number of its connections.
        self._num_open: Counter[str] = Counter()

    @contextlib.contextmanager
    def opened(self, sock: Any, peer: str) -> Iterator[None]:
        """Count a new connection, which is idle, until the end of the `with` block.

        A drain leaves it open for FIRST_REQUEST_S. If an old connection is closed before a
        response, clients send the request again. If a new one is closed, they do not. So the first
        request of a new connection is read and gets an error response.
        """
        self._num_open[peer] += 1
        self._idle[sock] = peer, time.monotonic() + FIRST_REQUEST_S
        try:
            if self._num_open[peer] > self.max_open // 2:
                self._close_oldest(peer)
            elif self._num_open.total() > self.max_open:
                self._close_oldest()
            yield
        finally:
            self._idle.pop(sock, None)
            self._num_open[peer] -= 1
            if not self._num_open[peer]:
                del self._num_open[peer]

    def start_request(self, sock: Any) -> None:
        """Note that a request has started on a connection."""
        self._idle.pop(sock, None)

    def end_request(self, sock: Any, peer: str) -> None:
        """Note that the request on a connection has ended."""
        if sock is not None:
            self._idle[sock] = peer, 0.0

    def close_idle(self) -> None:
        """Close the idle connections, for a drain. Those that were opened less than FIRST_REQUEST_S
        ago stay open (see `opened`)."""
        now = time.monotonic()
        for sock in [each for each, (_, closable_at) in self._idle.items() if closable_at <= now]:
            self._close(sock)

    def _close_oldest(self, peer: str | None = None) -> None:
        """Close the connection that has been idle for longest, if there is one. `peer` is the peer
        whose connections are considered; None: all."""
        idle = (sock for sock, (own, _) in self._idle.items() if peer in (None, own))
        if (oldest := next(idle, None)) is not None:
            self._close(oldest)

    def _close(self, sock: Any) -> None:
        """Shut down an idle connection, so that the server's pending read gets EOF. gevent's own
        `shutdown` would raise an error in that read, which the server would log."""
        del self._idle[sock]
        with contextlib.suppress(OSError):
            sock._sock.shutdown(socket.SHUT_RDWR)
