"""A link between two workers that can be made to hold messages back, or to change them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import zmq

from protocol import sockets, wire
from protocol.kv_peers import FromExporter, FromReader


class Proxy:
    """Of one reader at a time, at `address`, to the worker at `target`.

    holds      which messages stay, with all that come behind them in their direction, until
               `release`
    replaces   what is handed on instead of what the worker at `target` says
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, target: str) -> None:
        self.address = address
        self.holds: Callable[[Any], bool] = lambda message: False
        self.replaces: Callable[[Any], Any] = lambda message: message
        self.num_held = 0
        self._context, self._target = context, target
        self._router = sockets.bind_router(context, address)
        self._is_free = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cut()

    def cut(self) -> None:
        """The connections break, at both ends."""
        self._is_closed.set()
        self._is_free.set()
        self._thread.join()

    def release(self) -> None:
        """Nothing is held any more."""
        self.holds = lambda message: False
        self._is_free.set()

    def _run(self) -> None:
        readers: dict[bytes, zmq.Socket[bytes]] = {}
        while not self._is_closed.is_set():
            if self._router.poll(5):
                reader, *frames = self._router.recv_multipart()
                if reader not in readers:
                    readers[reader] = sockets.connect_dealer(self._context, self._target)
                message: Any = wire.Decoder(FromReader).decode(frames)
                self._wait_for(message)
                readers[reader].send_multipart(frames)
            for reader, socket in readers.items():
                if socket.poll(0):
                    message = wire.Decoder(FromExporter).decode(
                        [bytearray(frame) for frame in socket.recv_multipart()]
                    )
                    self._wait_for(message)
                    self._hand_on(reader, message)
        for socket in (*readers.values(), self._router):
            socket.close(linger=0)

    def _wait_for(self, message: Any) -> None:
        if self.holds(message):
            self.num_held += 1
            self._is_free.wait()

    def _hand_on(self, reader: bytes, message: Any) -> None:
        try:
            self._router.send_multipart([reader, *wire.encode(self.replaces(message))])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the reader has left
                raise
