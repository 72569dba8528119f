"""Registry of the engine's clients: when each one last sent a message, and how many bytes it has
not read.

The registry has no socket, and time is an argument (seconds of a steady clock). A client is dropped
in any of these cases:

- Its connection is gone, so that sending to it fails. To notice this, a client that has been silent
  for PROBE_AFTER_S is sent a Probe every PROBE_EVERY_S. A program that was killed or stopped loses
  its connection within seconds; a program that is only busy keeps it (protocol/wire/sockets.py:
  heartbeat).
- It is connected, but has sent nothing for `lease_s`.
- It has more than MAX_UNREAD_BYTES unread.
- All clients together have more than MAX_TOTAL_UNREAD_BYTES unread, and this one has the most. A
  client that has read nothing for STALLED_S is dropped before any client that reads.
- Results of encoding cannot be sent until it reads, and it has read nothing for `lease_s`, or for
  STALLED_S if it holds up the results of other clients (encode/result_sender.py).

A client dropped for its unread bytes is also ignored for IGNORED_S: its messages are discarded. The
mailbox closes the connection of a dropped client, if it is still open, which frees the bytes queued
for the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.engine.encoding import MAX_RESULT_NUMBERS
from protocol.wire.arrays import Float32

PROBE_AFTER_S = 2.0
PROBE_EVERY_S = 1.0
MAX_UNREAD_BYTES = 64 << 20
"""Limit of unread bytes per client.

It is checked before each message, so the queue may exceed it by one message. For comparison: a
gateway with 256 streams receives 5 MB in half a minute.
"""
MAX_TOTAL_UNREAD_BYTES = 4 * MAX_UNREAD_BYTES
"""Limit of unread bytes for all clients together, so that many clients cannot exhaust the memory.

It is fifty times the bytes that a gateway with 256 streams leaves unread if it stalls for half a
minute.
"""
MAX_UNREAD_WITH_RESULTS = MAX_UNREAD_BYTES * 3 // 4
"""A result of encoding is sent if its client then has at most this many unread bytes. The rest of
the limit is left for messages that do not wait.
"""
MAX_TOTAL_UNREAD_WITH_RESULTS = MAX_TOTAL_UNREAD_BYTES // 2
"""A result is sent if all clients together then have at most this many unread bytes."""
STALLED_S = 2.0
"""A client that has reported no newly read bytes for this long counts as stalled.

Clients report the number of bytes read in each Ping, twice a second.
"""
IGNORED_S = 10.0
MAX_IGNORED = 1024


@dataclass(slots=True)
class _Client:
    name: str
    last_message_at: float
    #: When a Ping last reported new bytes read; initially, when the client was added.
    read_at: float
    probed_at: float = float("-inf")
    #: `Hello.num_welcomes` of the last Hello.
    num_welcomes: int | None = None
    #: `num_welcomes` when the last Welcome was sent; None: none was sent, or the client does not
    #: count.
    welcomed_at: int | None = None
    #: Total bytes of the messages sent to the client since its first Hello.
    sent_bytes: int = 0
    #: Bytes that the client has read, according to its Pings. Never more than `sent_bytes`.
    read_bytes: int = 0

    @property
    def unread_bytes(self) -> int:
        return self.sent_bytes - self.read_bytes


class Clients:
    """The clients that have sent Hello and have not left."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._clients: dict[bytes, _Client] = {}
        #: Sum over all clients. It is kept up to date, so that sending needs no loop over clients.
        self._unread_bytes = 0
        self._ignored_until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: bytes) -> bool:
        return client in self._clients

    def all(self) -> list[bytes]:
        return list(self._clients)

    def add(
        self, client: bytes, now: float, name: str = "", *, num_welcomes: int | None = None
    ) -> None:
        """Add a client that has sent Hello. A known client keeps its counts of sent and read
        bytes."""
        record = self._clients.get(client)
        if record is None:
            record = self._clients[client] = _Client(name, last_message_at=now, read_at=now)
        record.name, record.last_message_at = name, now
        record.num_welcomes = num_welcomes

    # ---- greetings

    def has_unread_welcome(self, client: bytes) -> bool:
        """Return whether the client had not read the last Welcome when it sent its last Hello.

        A client that waits sends a Hello each second, and a Welcome contains the tokenizer. If the
        engine or the client is busy for some seconds, a Welcome for each Hello would exceed
        MAX_UNREAD_BYTES.
        """
        record = self._clients.get(client)
        return (
            record is not None
            and record.num_welcomes is not None
            and record.num_welcomes == record.welcomed_at
        )

    def on_welcomed(self, client: bytes) -> None:
        """Record that a Welcome was sent to the client."""
        if (record := self._clients.get(client)) is not None:
            record.welcomed_at = record.num_welcomes

    def get_name(self, client: bytes) -> str:
        """Return the name from the client's Hello, or "" if the client is unknown."""
        record = self._clients.get(client)
        return record.name if record else ""

    @property
    def described(self) -> str:
        """The names and identities of all clients, for the log."""
        return ", ".join(f"{each.name} ({client.hex()})" for client, each in self._clients.items())

    def on_message(self, client: bytes, now: float) -> None:
        """Record that the client sent a message. An unknown client is not added."""
        if (record := self._clients.get(client)) is not None:
            record.last_message_at = now

    def remove(self, client: bytes) -> None:
        if (record := self._clients.pop(client, None)) is not None:
            self._unread_bytes -= record.unread_bytes

    # ---- silence

    def due_probes(self, now: float) -> list[bytes]:
        """Return the clients to probe now, and record that they were probed."""
        due = [
            client
            for client, record in self._clients.items()
            if now - record.last_message_at > PROBE_AFTER_S
            and now - record.probed_at >= PROBE_EVERY_S
        ]
        for client in due:
            self._clients[client].probed_at = now
        return due

    def expire(self, now: float) -> list[bytes]:
        """Remove the clients whose lease has run out, and return them."""
        expired = [
            c for c, record in self._clients.items() if now - record.last_message_at > self._lease_s
        ]
        for client in expired:
            self.remove(client)
        return expired

    # ---- unread messages

    def sent_bytes(self, client: bytes) -> int:
        record = self._clients.get(client)
        return record.sent_bytes if record else 0

    @property
    def unread_bytes(self) -> int:
        """Bytes that all clients together have not read."""
        return self._unread_bytes

    def on_sent(self, client: bytes, num_bytes: int) -> None:
        if (record := self._clients.get(client)) is not None:
            record.sent_bytes += num_bytes
            self._unread_bytes += num_bytes

    def on_read(self, client: bytes, read_bytes: int, now: float) -> None:
        """Record the total number of bytes that the client reports as read."""
        if (record := self._clients.get(client)) is None:
            return
        num_bytes = min(read_bytes, record.sent_bytes) - record.read_bytes
        if num_bytes > 0:
            record.read_bytes += num_bytes
            record.read_at = now
            self._unread_bytes -= num_bytes

    def find_unread(self, client: bytes, now: float) -> bytes | None:
        """Return a client that must be dropped before another message is sent to `client`, or None.

        Return `client` itself if its unread bytes exceed MAX_UNREAD_BYTES. Otherwise, if all
        clients together exceed MAX_TOTAL_UNREAD_BYTES, return the one with the most unread bytes,
        among the stalled clients if there are any.
        """
        record = self._clients.get(client)
        if record is not None and record.unread_bytes > MAX_UNREAD_BYTES:
            return client
        if self._unread_bytes > MAX_TOTAL_UNREAD_BYTES:
            return self.worst_reader(now)
        return None

    def result_room(self, client: bytes) -> int:
        """Return how many bytes of results may be sent to `client`; it may be negative."""
        record = self._clients.get(client)
        if record is None:
            return 0
        return min(
            MAX_UNREAD_WITH_RESULTS - record.unread_bytes,
            MAX_TOTAL_UNREAD_WITH_RESULTS - self._unread_bytes,
        )

    @property
    def must_large_results_wait(self) -> bool:
        """Whether a result of the largest size must wait, because of all clients' unread bytes."""
        room = MAX_TOTAL_UNREAD_WITH_RESULTS - self._unread_bytes
        return room < MAX_RESULT_NUMBERS * Float32.itemsize

    def is_stalled(self, client: bytes, limit_s: float, now: float) -> bool:
        """Return whether `client` has unread bytes, and has read none for more than `limit_s`."""
        record = self._clients.get(client)
        return record is not None and record.unread_bytes > 0 and now - record.read_at > limit_s

    def worst_reader(self, now: float) -> bytes:
        """Return the stalled client with the most unread bytes. If no client is stalled, return the
        one with the most unread bytes."""

        def backlog(client: bytes) -> tuple[bool, int]:
            record = self._clients[client]
            return now - record.read_at > STALLED_S, record.unread_bytes

        return max(self._clients, key=backlog)

    def ignore(self, client: bytes, now: float) -> None:
        """Remove the client, and ignore its messages for IGNORED_S."""
        self.remove(client)
        self._ignored_until[client] = now + IGNORED_S
        if len(self._ignored_until) > MAX_IGNORED:
            del self._ignored_until[next(iter(self._ignored_until))]

    def is_ignored(self, client: bytes, now: float) -> bool:
        until = self._ignored_until.get(client)
        if until is not None and now >= until:
            del self._ignored_until[client]
        return until is not None and now < until
