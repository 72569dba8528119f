"""Messages between a script that uses `protocol.sdk.offline.LLM` and its text process.

The text process is a gateway without HTTP: it renders, tokenizes, and parses what the engine
generates. A request is one of the HTTP API, as its path and its JSON body, so both have the same
answers. The two processes share a pair of connected sockets. A frame is the length of a message in
four bytes (little-endian), followed by the message (`wire.py`).
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from protocol.config.base import Config
from protocol.engine.messages import Message
from protocol.wire import codec
from protocol.wire.errors import WireError

_LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 16


class OfflineConfig(Config, frozen=True, kw_only=True):
    """Options that an LLM passes to the process that starts its engine."""

    model: str
    #: Fields of the configs of the gateway, the engine and the worker, by name.
    options: dict[str, Any]
    #: Descriptor of the text process's socket.
    socket: int
    start_timeout_s: float


class OfflineRequest(Message, frozen=True, kw_only=True):
    """Script -> text process. Answer a request."""

    request: int
    path: str
    #: JSON.
    body: bytes


class OfflineAbort(Message, frozen=True, kw_only=True):
    """Script -> text process. Abort these requests; they get no answer."""

    requests: list[int]


class OfflineReady(Message, frozen=True, kw_only=True):
    """Text process -> script. The first message: requests can be answered."""

    model: str
    max_len: int
    max_slots: int


class OfflineAnswer(Message, frozen=True, kw_only=True):
    """Text process -> script. The answer to a request."""

    request: int
    #: Status of the HTTP API.
    status: int
    #: JSON.
    body: bytes


ToText = OfflineRequest | OfflineAbort
FromText = OfflineReady | OfflineAnswer


def to_frame(message: Message) -> bytes:
    """Return a message as a frame."""
    (data,) = codec.encode(message)
    return _LENGTH.pack(len(data)) + bytes(data)


class FrameReader:
    """Reads the messages of one direction from a socket.

    kind  union of the message classes of that direction
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._socket = sock
        self._decoder: codec.Decoder[Any] = codec.Decoder(kind)
        self._held = bytearray()

    def read(self) -> Any:
        """Wait for the next message and return it; None if the other side has closed the socket.
        Raises WireError if the message is malformed."""
        while (message := self._pop()) is None:
            data = self._socket.recv(READ_BYTES)
            if not data:
                return None
            self._held += data
        return message

    def _pop(self) -> Any:
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if length > codec.MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length:,} bytes")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        data = bytes(self._held[_LENGTH.size : end])
        del self._held[:end]
        return self._decoder.decode([data])
