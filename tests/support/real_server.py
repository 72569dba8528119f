"""A real server with the real model, as a person starts it, and a view of its engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol import sockets, wire
from protocol.messages import PROTOCOL_VERSION, Hello, Ping, Pong, ToClient, ToEngine
from protocol.stats import EngineStats
from tests.support.model import smollm2_gguf
from tests.support.processes import Program, free_port


@dataclass(frozen=True)
class RunningServer:
    port: int
    engine_address: str
    program: Program

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def running_server(directory: Path, options: Sequence[str] = ()) -> Iterator[RunningServer]:
    """`tidegate serve MODEL options`, until ready; stopped at the end.

    Sockets are in `directory`.
    """
    port = free_port()
    arguments = ["-m", "tools", "serve", str(smollm2_gguf()), "--port", str(port), *options]
    environment = {"XDG_RUNTIME_DIR": str(directory), "PYTHONUNBUFFERED": "1"}
    with Program(arguments, environment=environment) as program:
        program.line_with("(ready in", timeout_s=120)
        address = program.line_with("ZeroMQ:").partition("ZeroMQ:")[2].strip()
        yield RunningServer(port, address, program)
        program.process.terminate()
        assert program.end() == 0, program.said


class EngineView:
    """Asks an engine for its numbers of this moment, not of the last heartbeat."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.connect_dealer(self._context, address)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.setsockopt(zmq.SNDTIMEO, 10_000)
        self._decoder: wire.Decoder[ToClient] = wire.Decoder(ToClient)
        self._ask(Hello(protocol=PROTOCOL_VERSION, name="test"))

    def stats(self) -> EngineStats:
        while True:
            reply = self._ask(Ping())
            if isinstance(reply, Pong):
                return reply.stats

    def wait_until_free(self, timeout_s: float) -> float:
        """Seconds until nothing runs or waits and every block is free. Raises TimeoutError."""
        started = time.monotonic()
        while (took := time.monotonic() - started) < timeout_s:
            now = self.stats()
            if not now.running and not now.waiting and now.free_blocks == now.total_blocks:
                return took
            time.sleep(0.01)
        raise TimeoutError(f"still busy after {timeout_s} s: {self.stats()}")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _ask(self, message: ToEngine) -> ToClient:
        self._socket.send_multipart(wire.encode(message))
        return self._decoder.decode(self._socket.recv_multipart())
