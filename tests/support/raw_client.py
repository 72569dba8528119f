"""A client of an engine that says just what a test wants it to say."""

from __future__ import annotations

import zmq

from protocol import sockets, wire
from protocol.cluster_key import ClusterKey
from protocol.messages import PROTOCOL_VERSION, Hello, Message, Probe, ToClient, Welcome


class RawClient:
    def __init__(self, address: str, key: ClusterKey | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = sockets.connect_dealer(self._context, address, key)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._decoder: wire.Decoder[ToClient] = wire.Decoder(ToClient)

    def send(self, message: Message) -> None:
        self.socket.send_multipart(wire.encode(message))

    def receive(self) -> ToClient:
        """Return the next message, but for probes, which an engine sends to a silent client."""
        while isinstance(message := self.receive_any(), Probe):
            pass
        return message

    def receive_kind(self, kind: type[ToClient]) -> ToClient:
        """Return the next message of a kind; others are passed over."""
        while not isinstance(message := self.receive_any(), kind):
            pass
        return message

    def receive_any(self) -> ToClient:
        """Return the next message, probes too."""
        return self._decoder.decode(self.socket.recv_multipart())

    def greet(self) -> None:
        self.send(Hello(protocol=PROTOCOL_VERSION, name="raw"))
        assert isinstance(self.receive_kind(Welcome), Welcome)

    def close(self) -> None:
        self._context.destroy(linger=0)
