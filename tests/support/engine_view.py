"""An engine's numbers of this moment, not of the last heartbeat."""

from __future__ import annotations

import time

import zmq

from protocol import sockets, wire
from protocol.cluster_key import ClusterKey
from protocol.messages import PROTOCOL_VERSION, Hello, Ping, Pong, SessionLost, ToClient, ToEngine
from protocol.stats import EngineStats
from tests.support.waiting import HANG_S, eventually

ASK_AGAIN_MS = 1000


class EngineView:
    def __init__(self, address: str, key: ClusterKey | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.connect_dealer(self._context, address, key)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.setsockopt(zmq.SNDTIMEO, 10_000)
        self._decoder: wire.Decoder[ToClient] = wire.Decoder(ToClient)

    def stats(self) -> EngineStats:
        """Ask until the engine answers: if it ends this connection, the question is lost, too."""
        while self._socket.poll(0):  # what was said unasked
            self._socket.recv_multipart()
        give_up_at = time.monotonic() + HANG_S
        while time.monotonic() < give_up_at:
            self._say(Ping())
            while self._socket.poll(ASK_AGAIN_MS):
                match self._hear():
                    case Pong(stats=stats):
                        return stats
                    case SessionLost():  # it forgets who is silent
                        self._say(Hello(protocol=PROTOCOL_VERSION, name="test"))
                        self._say(Ping())
        raise TimeoutError(f"the engine did not answer within {HANG_S} s")

    def wait_until_free(self, timeout_s: float = HANG_S) -> None:
        """Wait until nothing runs or waits and every block is free. Raises TimeoutError."""

        def is_free() -> bool:
            now = self.stats()
            return not now.running and not now.waiting and now.free_blocks == now.total_blocks

        if not eventually(is_free, within_s=timeout_s):
            raise TimeoutError(f"still busy after {timeout_s} s: {self.stats()}")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _say(self, message: ToEngine) -> None:
        self._socket.send_multipart(wire.encode(message))

    def _hear(self) -> ToClient:
        return self._decoder.decode(self._socket.recv_multipart())
