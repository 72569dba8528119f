"""The engine's clients: when each last sent something, and how many sent bytes it has not read.

Pure bookkeeping; time is an argument (seconds of a steady clock). A client is dropped if

- its connection is gone: a message to it cannot be sent. A client that has been silent for
  PROBE_AFTER_S is probed for that once a second. A program that is killed or stopped loses its
  connection within seconds; one that is only busy keeps it (protocol/sockets.py: heartbeat);
- its connection lives, but it has sent nothing for `lease_s`;
- it leaves more than MAX_UNREAD_BYTES unread. It is then ignored for IGNORED_S, in which libzmq
  ends the connection of a peer that still reads nothing, and frees what was queued for it.
"""

from __future__ import annotations

from dataclasses import dataclass

PROBE_AFTER_S = 2.0
PROBE_EVERY_S = 1.0
MAX_UNREAD_BYTES = 64 << 20
"""One message more may be queued. Half a minute of a gateway with 256 streams is 5 MB."""
IGNORED_S = 10.0
MAX_IGNORED = 1024


@dataclass(slots=True)
class _Client:
    name: str
    heard_at: float
    probed_at: float = float("-inf")
    #: Bytes of all messages sent to it since its first Hello.
    sent_bytes: int = 0
    #: Bytes that it has read, by its last Ping. Never more than `sent_bytes`.
    read_bytes: int = 0


class Clients:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._clients: dict[bytes, _Client] = {}
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
            self._clients[client] = _Client(name, now)
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
        self._clients.pop(client, None)

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

    def on_sent(self, client: bytes, num_bytes: int) -> None:
        if (known := self._clients.get(client)) is not None:
            known.sent_bytes += num_bytes

    def on_read(self, client: bytes, read_bytes: int) -> None:
        """Record how many of the sent bytes the client reports as read."""
        if (known := self._clients.get(client)) is not None:
            known.read_bytes = max(known.read_bytes, min(read_bytes, known.sent_bytes))

    def reads_too_little(self, client: bytes) -> bool:
        known = self._clients.get(client)
        return known is not None and known.sent_bytes - known.read_bytes > MAX_UNREAD_BYTES

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
