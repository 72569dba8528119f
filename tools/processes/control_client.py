"""The commands' side of the control socket (protocol/tools/control.py), with blocking calls."""

from __future__ import annotations

import socket
from collections import deque
from pathlib import Path
from typing import Self

from protocol.tools.control import (
    ControlError,
    ControlReader,
    FromSupervisor,
    ToSupervisor,
    control_address,
    encode,
)
from protocol.wire.errors import WireError
from tools.failure import Failure

READ_BYTES = 1 << 16


class ControlClient:
    """A connection to the supervisor of one server.

    directory   run directory of the server
    timeout_s   most seconds to wait for a reply; None: no limit

    All methods raise Failure if the supervisor does not answer, or refuses the request.
    """

    def __init__(self, directory: Path, timeout_s: float | None = 10.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        self._reader: ControlReader[FromSupervisor] = ControlReader(FromSupervisor)
        self._received: deque[FromSupervisor] = deque()
        try:
            self._socket.connect(control_address(directory))
        except OSError as error:
            self._socket.close()
            raise Failure(f"the supervisor cannot be reached: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def send(self, request: ToSupervisor) -> FromSupervisor:
        """Send a request and return the first reply."""
        try:
            self._socket.sendall(encode(request))
        except OSError as error:
            raise Failure(f"the supervisor does not answer: {error.strerror or error}") from None
        return self.receive()

    def receive(self) -> FromSupervisor:
        """Return the next reply."""
        while not self._received:
            self._received.extend(self._read())
        reply = self._received.popleft()
        if isinstance(reply, ControlError):
            raise Failure(reply.message)
        return reply

    def _read(self) -> list[FromSupervisor]:
        """Wait for some bytes, and return the replies that they complete."""
        try:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise Failure("the supervisor has closed the connection")
            return self._reader.push(data)
        except OSError as error:
            raise Failure(f"the supervisor does not answer: {error.strerror or error}") from None
        except WireError as error:
            raise Failure(f"the supervisor's reply cannot be read: {error}") from None
