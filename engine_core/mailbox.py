"""The engine's end of all clients: one socket, who is there, and whether they hear.

Its laws:

- frames that are no message are counted and refused, and the conversation goes on; a flood of them
  is no flood of log lines;
- a client that is not connected any more, or that does not read, is dropped (clients.py), and
  `on_gone` is called with it;
- nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping

import zmq

from engine_core.clients import Clients
from protocol import sockets, wire
from protocol.cluster_key import ClusterKey
from protocol.errors import WireError
from protocol.messages import Hello, Message, Probe, Refused, ToEngine

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 1000


class Mailbox:
    """socket          for a poll
    clients         who has said Hello, and is still there
    num_wire_errors of all clients, ever
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        key: ClusterKey | None,
        *,
        lease_s: float,
        on_gone: Callable[[bytes], None],
    ) -> None:
        self.socket = sockets.bind_router(context, address, key, heartbeat=True)
        self.clients = Clients(lease_s)
        self.num_wire_errors = 0
        #: Of the clients, and perhaps of some that have left since another came.
        self._connections: dict[bytes, sockets.PeerConnection] = {}
        self._on_gone = on_gone
        self._decoder: wire.Decoder[ToEngine] = wire.Decoder(ToEngine)

    def receive(self, now: float) -> Iterator[tuple[bytes, ToEngine]]:
        """What has come, with whom it is from; not more than one turn of the loop may take."""
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
                self._refuse(client, error)
                continue
            if isinstance(message, Hello) and client not in self.clients:
                self._remember_connection(client, sender)
            self.clients.hear(client, now)
            yield client, message

    def tell(self, client: bytes, message: Message) -> None:
        now = time.monotonic()
        while (unread := self.clients.find_unread(client, now)) is not None:
            self._ignore(unread, now)
        if not self.clients.is_ignored(client, now):
            self._send(client, message)

    def _send(self, client: bytes, message: Message) -> None:
        frames = wire.encode(message)
        try:
            self.socket.send_multipart([client, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if client in self.clients:
                log.info("client %s is gone: %s", client.hex(), error)
                self.clients.drop(client)
                self._on_gone(client)
        else:
            self.clients.on_sent(client, sum(memoryview(frame).nbytes for frame in frames))

    def _ignore(self, client: bytes, now: float) -> None:
        log.warning("dropping client %s, which does not read its messages", client.hex())
        self.clients.ignore(client, now)
        self._on_gone(client)
        self._disconnect(client)

    def _disconnect(self, client: bytes) -> None:
        """End the connection of a client that was dropped; libzmq frees what is queued for it."""
        if (connection := self._connections.pop(client, None)) is not None:
            connection.shut_down()

    def _remember_connection(self, client: bytes, sender: zmq.Frame) -> None:
        """Keep the connection of a new client, and forget those of clients that have left."""
        self._connections = {c: k for c, k in self._connections.items() if c in self.clients}
        if (connection := sockets.PeerConnection.from_frame(sender)) is not None:
            self._connections[client] = connection

    def check_clients(self, now: float) -> None:
        """Find out which silent clients are gone."""
        for client in self.clients.to_probe(now):
            self.tell(client, Probe())
        for client in self.clients.expire(now):
            log.warning("client %s fell silent; its requests are aborted", client.hex())
            self._on_gone(client)
            self._disconnect(client)

    def tell_each(self, messages: Mapping[bytes, Message]) -> None:
        for client, message in messages.items():
            self.tell(client, message)

    def tell_everybody(self, message: Message) -> None:
        for client in self.clients.all():
            self.tell(client, message)

    def close(self) -> None:
        self.socket.close()

    def _refuse(self, client: bytes, error: WireError) -> None:
        self.num_wire_errors += 1
        if self.num_wire_errors.bit_count() == 1:  # the 1st, 2nd, 4th ...
            told = "client %s sent a malformed message (the %d. of all): %s"
            log.warning(told, client.hex(), self.num_wire_errors, error)
        self.tell(client, Refused(request=-1, error=error.info()))
