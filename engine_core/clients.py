"""The engine's clients: when each last sent something, and how many sent bytes it has not read.

Pure bookkeeping; time is an argument (seconds of a steady clock). A client is dropped if

- its connection is gone: a message to it cannot be sent. A client that has been silent for
  PROBE_AFTER_S is probed for that once a second. A program that is killed or stopped loses its
  connection within seconds; one that is only busy keeps it (protocol/sockets.py: heartbeat);
- its connection lives, but it has sent nothing for `lease_s`;
- it leaves more than MAX_UNREAD_BYTES unread. What still comes from it is ignored for IGNORED_S;
- all clients together leave more than MAX_TOTAL_UNREAD_BYTES unread, and it leaves the most. A
  client that has read nothing for STALLED_S goes before any that reads.

The mailbox ends the connection of a client that was dropped, if there still is one. This frees the
bytes that were queued for it.
"""

from __future__ import annotations

from dataclasses import dataclass

PROBE_AFTER_S = 2.0
PROBE_EVERY_S = 1.0
MAX_UNREAD_BYTES = 64 << 20
"""One message more may be queued. Half a minute of a gateway with 256 streams is 5 MB."""
MAX_TOTAL_UNREAD_BYTES = 4 * MAX_UNREAD_BYTES
"""For all clients together, so that their number does not multiply the memory that they cost. It is
fifty times what a gateway that stalls for half a minute leaves, and little beside a model."""
STALLED_S = 2.0
"""A client that reads reports it with each Ping, twice a second."""
IGNORED_S = 10.0
MAX_IGNORED = 1024


@dataclass(slots=True)
class _Client:
    name: str
    heard_at: float
    #: When its Ping last reported that it had read more; at first, when it was added.
    read_at: float
    probed_at: float = float("-inf")
    #: Bytes of all messages sent to it since its first Hello.
    sent_bytes: int = 0
    #: Bytes that it has read, by its last Ping. Never more than `sent_bytes`.
    read_bytes: int = 0

    @property
    def unread_bytes(self) -> int:
        return self.sent_bytes - self.read_bytes


class Clients:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._clients: dict[bytes, _Client] = {}
        #: The sum over all clients, kept up to date so that no message costs a loop.
        self._unread_bytes = 0
        self._ignored_until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: bytes) -> bool:
        return client in self._clients

    def all(self) -> list[bytes]:
        return list(self._clients)

    def greet(self, client: bytes, now: float, name: str = "") -> None:
        """Add a client that has sent Hello. Messages that it has not read yet still count."""
        known = self._clients.get(client)
        if known is None:
            self._clients[client] = _Client(name, heard_at=now, read_at=now)
        else:
            known.name, known.heard_at = name, now

    def name_of(self, client: bytes) -> str:
        """As it said; "" of one that is not known."""
        known = self._clients.get(client)
        return known.name if known else ""

    def hear(self, client: bytes, now: float) -> None:
        """It said something; a client that never said Hello stays unknown."""
        if (known := self._clients.get(client)) is not None:
            known.heard_at = now

    def drop(self, client: bytes) -> None:
        if (known := self._clients.pop(client, None)) is not None:
            self._unread_bytes -= known.unread_bytes

    # ---- silence

    def to_probe(self, now: float) -> list[bytes]:
        """Return the clients whose connection is to be tried now: they count as tried."""
        due = [
            client
            for client, known in self._clients.items()
            if now - known.heard_at > PROBE_AFTER_S and now - known.probed_at >= PROBE_EVERY_S
        ]
        for client in due:
            self._clients[client].probed_at = now
        return due

    def expire(self, now: float) -> list[bytes]:
        """Forget, and name, those whose lease has run out."""
        gone = [c for c, known in self._clients.items() if now - known.heard_at > self._lease_s]
        for client in gone:
            self.drop(client)
        return gone

    # ---- unread messages

    def sent_bytes(self, client: bytes) -> int:
        known = self._clients.get(client)
        return known.sent_bytes if known else 0

    @property
    def unread_bytes(self) -> int:
        """The bytes that all clients together have not read."""
        return self._unread_bytes

    def on_sent(self, client: bytes, num_bytes: int) -> None:
        if (known := self._clients.get(client)) is not None:
            known.sent_bytes += num_bytes
            self._unread_bytes += num_bytes

    def on_read(self, client: bytes, read_bytes: int, now: float) -> None:
        """Record how many of the sent bytes the client reports as read."""
        if (known := self._clients.get(client)) is None:
            return
        num_bytes = min(read_bytes, known.sent_bytes) - known.read_bytes
        if num_bytes > 0:
            known.read_bytes += num_bytes
            known.read_at = now
            self._unread_bytes -= num_bytes

    def find_unread(self, client: bytes, now: float) -> bytes | None:
        """Return a client to be dropped before `client` is sent more; None if none has to be."""
        known = self._clients.get(client)
        if known is not None and known.unread_bytes > MAX_UNREAD_BYTES:
            return client
        if self._unread_bytes > MAX_TOTAL_UNREAD_BYTES:
            return self._worst_reader(now)
        return None

    def _worst_reader(self, now: float) -> bytes:
        """Return the client with the most unread bytes, of the stalled ones if there are any."""

        def backlog(client: bytes) -> tuple[bool, int]:
            known = self._clients[client]
            return now - known.read_at > STALLED_S, known.unread_bytes

        return max(self._clients, key=backlog)

    def ignore(self, client: bytes, now: float) -> None:
        """Drop the client, and ignore its messages until IGNORED_S from now."""
        self.drop(client)
        self._ignored_until[client] = now + IGNORED_S
        if len(self._ignored_until) > MAX_IGNORED:
            del self._ignored_until[next(iter(self._ignored_until))]

    def is_ignored(self, client: bytes, now: float) -> bool:
        until = self._ignored_until.get(client)
        if until is not None and now >= until:
            del self._ignored_until[client]
        return until is not None and now < until
