"""A client of an engine that sends only the messages of a test, and nothing by itself."""

from __future__ import annotations

from typing import Self

import zmq

from protocol.engine.messages import PROTOCOL_VERSION, Hello, Message, Probe, ToClient, Welcome
from protocol.wire import codec, sockets
from protocol.wire.cluster_key import ClusterKey


class RawClient:
    """A DEALER socket connected to an engine. A receive waits up to a minute for a message, then
    raises zmq.Again."""

    def __init__(self, address: str, key: ClusterKey | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = sockets.connect_dealer(self._context, address, key)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._decoder: codec.Decoder[ToClient] = codec.Decoder(ToClient)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send(self, message: Message) -> None:
        self.socket.send_multipart(codec.encode(message))

    def receive(self) -> ToClient:
        """Return the next message that is not a probe. Engines send probes to silent clients."""
        while isinstance(message := self.receive_any(), Probe):
            pass
        return message

    def receive_kind(self, kind: type[ToClient]) -> ToClient:
        """Return the next message of type `kind`, and drop all others before it."""
        while not isinstance(message := self.receive_any(), kind):
            pass
        return message

    def receive_any(self) -> ToClient:
        """Return the next message, which may be a probe."""
        return self._decoder.decode(self.socket.recv_multipart())

    def greet(self) -> None:
        """Send Hello, and wait for the engine's Welcome."""
        self.send(Hello(protocol=PROTOCOL_VERSION, name="raw"))
        assert isinstance(self.receive_kind(Welcome), Welcome)

    def close(self) -> None:
        self._context.destroy(linger=0)
