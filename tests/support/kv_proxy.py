"""A proxy between two workers that can delay or replace their messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import zmq

from protocol.wire import codec, sockets
from protocol.worker.kv_peers import FromExporter, FromReader


class Proxy:
    """Forwards messages between readers at `address` and the worker at `target`.

    holds      returns whether a message, and all after it, must wait for `release`
    replaces   returns the message to forward in place of a message from `target`
    num_held   how many messages were held
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
        """Break the connections at both ends."""
        self._is_closed.set()
        self._is_free.set()
        self._thread.join()

    def release(self) -> None:
        """Forward the messages that were held. Hold no later ones."""
        self.holds = lambda message: False
        self._is_free.set()

    def _run(self) -> None:
        readers: dict[bytes, zmq.Socket[bytes]] = {}
        while not self._is_closed.is_set():
            if self._router.poll(5):
                reader, *frames = self._router.recv_multipart()
                if reader not in readers:
                    readers[reader] = sockets.connect_dealer(self._context, self._target)
                message: Any = codec.Decoder(FromReader).decode(frames)
                self._wait_for(message)
                readers[reader].send_multipart(frames)
            for reader, socket in readers.items():
                if socket.poll(0):
                    message = codec.Decoder(FromExporter).decode(
                        [bytearray(frame) for frame in socket.recv_multipart()]
                    )
                    self._wait_for(message)
                    self._forward(reader, message)
        for socket in (*readers.values(), self._router):
            socket.close(linger=0)

    def _wait_for(self, message: Any) -> None:
        if self.holds(message):
            self.num_held += 1
            self._is_free.wait()

    def _forward(self, reader: bytes, message: Any) -> None:
        try:
            self._router.send_multipart([reader, *codec.encode(self.replaces(message))])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the reader has left
                raise
