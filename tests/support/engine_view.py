"""Requests an engine's current statistics, which are newer than those of its last heartbeat."""

from __future__ import annotations

import time
from typing import Self

import zmq

from protocol.engine.messages import (
    PROTOCOL_VERSION,
    Hello,
    Ping,
    Pong,
    SessionLost,
    ToClient,
    ToEngine,
)
from protocol.engine.stats import EngineStats
from protocol.wire import codec, sockets
from protocol.wire.cluster_key import ClusterKey
from tests.support.waiting import HANG_S, eventually

RETRY_MS = 1000


def is_free(stats: EngineStats) -> bool:
    """Return whether the engine holds no request, no lease and no block.

    A request's blocks are freed after its end, when the step in flight is committed.
    """
    is_idle = not (stats.running or stats.waiting or stats.fetching or stats.leases)
    return is_idle and stats.free_blocks == stats.total_blocks


class EngineView:
    """A client of an engine that requests its statistics and nothing else."""

    def __init__(self, address: str, key: ClusterKey | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.connect_dealer(self._context, address, key)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.setsockopt(zmq.SNDTIMEO, 10_000)
        self._decoder: codec.Decoder[ToClient] = codec.Decoder(ToClient)

    def stats(self) -> EngineStats:
        """Return the engine's statistics. Raises TimeoutError.

        The ping is repeated, because it is lost if the engine ends this connection.
        """
        while self._socket.poll(0):  # messages that were not requested
            self._socket.recv_multipart()
        give_up_at = time.monotonic() + HANG_S
        while time.monotonic() < give_up_at:
            self._send(Ping())
            while self._socket.poll(RETRY_MS):
                match self._receive():
                    case Pong(stats=stats):
                        return stats
                    case SessionLost():  # the engine ends the sessions of silent clients
                        self._send(Hello(protocol=PROTOCOL_VERSION, name="test"))
                        self._send(Ping())
        raise TimeoutError(f"the engine did not answer within {HANG_S} s")

    def wait_until_free(self, timeout_s: float = HANG_S) -> None:
        """Wait until the engine `is_free`. Raises TimeoutError."""
        if not eventually(lambda: is_free(self.stats()), within_s=timeout_s):
            raise TimeoutError(f"still busy after {timeout_s} s: {self.stats()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _send(self, message: ToEngine) -> None:
        self._socket.send_multipart(codec.encode(message))

    def _receive(self) -> ToClient:
        return self._decoder.decode(self._socket.recv_multipart())
