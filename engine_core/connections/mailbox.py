"""The engine's client socket: receives, sends, and drops clients that are gone or do not read.

- A malformed message is counted and refused, and the client's session continues. If the message
  would open a request, the refusal ends only this request. Only the 1st, 2nd,
  4th, 8th, ... malformed message is logged, so a flood of them does not fill the log.
- A client that has disconnected or does not read is dropped (clients.py), and `on_client_lost` is
  called with it.
- No method blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
import zmq

from engine_core.connections.clients import Clients
from protocol.engine.messages import Hello, Message, Probe, Refused, ToEngine
from protocol.wire import codec, sockets
from protocol.wire.cluster_key import ClusterKey
from protocol.wire.errors import WireError

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 1000


class _Opening(msgspec.Struct, frozen=True):
    """The part of a malformed message that names the request to open, for the kinds of message that
    a Refused may answer."""

    kind: Literal["generate", "encode"]
    request: int


class Mailbox:
    """The ROUTER socket that all clients connect to."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        key: ClusterKey | None,
        *,
        lease_s: float,
        on_client_lost: Callable[[bytes], None],
    ) -> None:
        #: The ROUTER socket, which the loop polls.
        self.socket = sockets.bind_router(context, address, key, heartbeat=True)
        #: The clients that have sent Hello and have not left.
        self.clients = Clients(lease_s)
        #: Number of malformed messages since the start, from all clients.
        self.num_wire_errors = 0
        #: Whether to log each client that has disconnected. While the model loads, no client is
        #: logged when it connects either: programs ask again and again whether the engine is ready.
        self.logs_clients = False
        #: Client -> its connection. Entries of clients that have left are removed when a client is
        #: added.
        self._connections: dict[bytes, sockets.PeerConnection] = {}
        self._on_client_lost = on_client_lost
        self._decoder: codec.Decoder[ToEngine] = codec.Decoder(ToEngine)
        self._openings: codec.Decoder[_Opening] = codec.Decoder(_Opening)

    def receive(self, now: float) -> Iterator[tuple[bytes, ToEngine]]:
        """Yield (client, message) for each waiting message, at most MESSAGES_PER_TURN."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                sender = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            client, frames = sender.bytes, self.socket.recv_multipart()
            if self.clients.is_ignored(client, now):
                continue
            try:
                message = self._decoder.decode(frames)
            except WireError as error:
                self._refuse(client, frames, error)
                continue
            if isinstance(message, Hello) and client not in self.clients:
                self._remember_connection(client, sender)
            self.clients.on_message(client, now)
            yield client, message

    def send(self, client: bytes, message: Message) -> None:
        """Send `message` to `client`, without blocking.

        Clients whose unread bytes exceed a limit are dropped first; `client` may be one of them.
        """
        now = time.monotonic()
        while (unread := self.clients.find_unread(client, now)) is not None:
            self.drop(unread, now)
        if not self.clients.is_ignored(client, now):
            self._try_to_send(client, message)

    def _try_to_send(self, client: bytes, message: Message) -> None:
        frames = codec.encode(message)
        try:
            self.socket.send_multipart([client, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if client in self.clients:
                if self.logs_clients:
                    log.info("client %s is gone: %s", client.hex(), error)
                self.clients.remove(client)
                self._on_client_lost(client)
        else:
            self.clients.on_sent(client, sum(memoryview(frame).nbytes for frame in frames))

    def drop(self, client: bytes, now: float) -> None:
        """Drop a client that does not read, and ignore it for a while."""
        log.warning("dropping client %s, which does not read its messages", client.hex())
        self.clients.ignore(client, now)
        self._on_client_lost(client)
        self._disconnect(client)

    def _disconnect(self, client: bytes) -> None:
        """Close the connection of a dropped client. libzmq then frees its queued messages."""
        if (connection := self._connections.pop(client, None)) is not None:
            connection.shut_down()

    def _remember_connection(self, client: bytes, sender: zmq.Frame) -> None:
        """Store the connection of a new client, and remove those of clients that have left."""
        self._connections = {c: k for c, k in self._connections.items() if c in self.clients}
        if (connection := sockets.PeerConnection.from_frame(sender)) is not None:
            self._connections[client] = connection

    def check_clients(self, now: float) -> None:
        """Probe silent clients, and drop those whose lease has run out."""
        for client in self.clients.due_probes(now):
            self.send(client, Probe())
        for client in self.clients.expire(now):
            log.warning(
                "client %s sent nothing for its lease time; aborting its requests", client.hex()
            )
            self._on_client_lost(client)
            self._disconnect(client)

    def send_each(self, messages: Mapping[bytes, Message]) -> None:
        for client, message in messages.items():
            self.send(client, message)

    def broadcast(self, message: Message) -> None:
        for client in self.clients.all():
            self.send(client, message)

    def close(self) -> None:
        self.socket.close()

    def _refuse(self, client: bytes, frames: list[bytes], error: WireError) -> None:
        self.num_wire_errors += 1
        if self.num_wire_errors.bit_count() == 1:  # the 1st, 2nd, 4th ...
            text = "client %s sent a malformed message (number %d since the start): %s"
            log.warning(text, client.hex(), self.num_wire_errors, error)
        try:
            request = self._openings.decode(frames).request
        except WireError:
            request = -1
        self.send(client, Refused(request=request, error=error.info()))
